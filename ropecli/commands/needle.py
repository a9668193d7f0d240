"""`ropecli needle`: measures whether a model finds a key in a text."""

from typing import TYPE_CHECKING, Annotated

from annotated_doc import Doc
from annotated_types import Ge
from typing_extensions import Unpack

from ropecli.commands import options
from ropecli.commands.key_search import make_search
from ropecli.commands.messages import progress_bar, warn
from ropecli.commands.signature import Flag, Renamed, command

if TYPE_CHECKING:
    from ropecli.evaluation.eval_report import RetrievalReport
    from ropecli.evaluation.retrieval.haystack import PieceTokenizer
    from ropecli.evaluation.retrieval.prompts import RetrievalTask


SearchedText = Annotated[
    str,
    Flag("--data", "-d"),
    Doc("Text to hide the needle in: 'demo', a file or folder of text or rows, or a Hub id."),
    options.DATA,
]
Style = Annotated[
    str | None,
    Doc(
        "code: AMBER_KEY = 48213 among lines of source, asked by `AMBER_KEY =`. prose: a sentence and a question. "
        "Default: code for 'demo' and 'demo-train', else prose."
    ),
]
Needle = Annotated[
    str | None,
    Flag("--needle", metavar="TEMPLATE"),
    Doc("Your own needle, with {key}, and {name} if --num-needles is above 1."),
]
Question = Annotated[
    str | None,
    Flag("--question", metavar="TEMPLATE"),
    Doc("For --needle: the last line, which the key completes, with {name}."),
]
NumNeedles = Annotated[
    int,
    Ge(1),
    Renamed("keys"),
    Doc("Number of needles with different names. One is asked for, the others are spread evenly."),
]


class NeedleOptions(options.EvalTextOptions, options.SearchOptions, total=False): ...


@command
def needle(
    checkpoint: options.Checkpoint,
    *,
    data: SearchedText = "demo",
    style: Style = None,
    needle: Needle = None,
    question: Question = None,
    num_needles: NumNeedles = 1,
    **shared: Unpack[NeedleOptions],
) -> "RetrievalReport":
    """Measure whether a model finds a needle in a text of your choice, by length and depth.

    The key is a random number of five digits. A model that confuses several needles scores 1 ÷ --num-needles.

    Several processes, started by `accelerate launch -m ropecli needle ...`, share the prompts.
    """
    from ropecli.commands.subject import open_subject
    from ropecli.data.sources import read_texts
    from ropecli.evaluation.chat_frame import find_frame
    from ropecli.evaluation.retrieval.haystack import read_haystack
    from ropecli.evaluation.retrieval.prompts import RetrievalTask
    from ropecli.evaluation.retrieval.templates import choose_templates, default_style

    data = options.with_config(data, shared["dataset_config"])
    loading = options.loading_of(shared)
    search = make_search(shared, num_needles)
    default = default_style(data)
    templates = choose_templates(style, needle, question, default)
    templates.check_keys(num_needles)
    subject = open_subject(checkpoint, shared)
    search = search.at(subject)
    text_column, split = shared["text_column"], shared["split"]
    texts = read_texts(data, text_column=text_column, split=split)

    def make_task(pieces: "PieceTokenizer") -> "RetrievalTask":
        with progress_bar("reading documents", None) as step:
            haystack = read_haystack(texts, pieces, step)
        if len(haystack.ids) < search.lengths[-1]:
            warn(f"The text has {len(haystack.ids)} tokens. It is repeated to fill {search.lengths[-1]}.")
        return RetrievalTask(
            "needle",
            templates,
            haystack,
            pieces,
            keys=num_needles,
            candidates=search.candidates,
            seed=search.seed,
            frame=find_frame(pieces.tokenizer, shared["chat_template"]),
        )

    own = {"style": (style or default) if needle is None else None, "text_column": text_column, "split": split}
    return search.run(subject, data, make_task, own, **loading)
