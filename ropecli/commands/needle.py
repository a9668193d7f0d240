"""`ropecli needle`: whether a model finds a key in a text of the user's choice, by length and depth."""

from typing import TYPE_CHECKING, Annotated

from annotated_doc import Doc
from annotated_types import Ge

from ropecli.commands import options
from ropecli.commands.key_search import DEPTHS, LENGTHS, make_search
from ropecli.commands.messages import progress_bar, warn
from ropecli.commands.options import Flag

if TYPE_CHECKING:
    from ropecli.evaluation.eval_report import RetrievalReport
    from ropecli.evaluation.retrieval.haystack import PieceTokenizer
    from ropecli.evaluation.retrieval.prompts import RetrievalTask

_CODE = ("demo", "demo-train")


def needle(
    checkpoint: options.Checkpoint,
    *,
    data: Annotated[
        str, Flag("--data", "-d"), Doc("The text between: 'demo', a file or folder of text or rows, or a Hub id.")
    ] = "demo",
    lengths: options.PromptLengths = LENGTHS,
    depths: options.Depths = DEPTHS,
    trials: options.Trials = 5,
    style: Annotated[
        str | None,
        Doc(
            "code: AMBER_KEY = 48213 among lines of source, asked by `AMBER_KEY =`. prose: a sentence and a question. "
            "Else code for the data 'demo' and 'demo-train', which are source, and prose for other data."
        ),
    ] = None,
    needle: Annotated[
        str | None,
        Flag("--needle", metavar="TEMPLATE"),
        Doc("A line of your own with {key}, and {name} where there are --keys."),
    ] = None,
    question: Annotated[
        str | None,
        Flag("--question", metavar="TEMPLATE"),
        Doc("For --needle: the last line, which the key completes; with its {name}."),
    ] = None,
    keys: Annotated[
        int, Ge(1), Doc("Needles with different names, one asked for, the others spread evenly in the text.")
    ] = 1,
    mode: options.Mode = "rank",
    candidates: options.Candidates = None,
    seed: options.Seed = 0,
    method: options.InMemory = None,
    factor: options.Factor = None,
    settings: options.Settings = None,
    factors_file: options.FactorsFile = None,
    original_length: options.OriginalLength = None,
    text_column: options.TextColumn = "text",
    split: options.Split = None,
    chunk: options.Chunk = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    attn: options.Attn = "auto",
    output: options.ReportFile = None,
    plot: options.HeatMap = None,
    revision: options.Revision = None,
) -> "RetrievalReport":
    """Look for a needle in a text of your choice, at several lengths and depths.

    The key is a random number of five digits. A model that cannot tell several --keys apart scores 1 ÷ keys.

    Several processes, started by `accelerate launch -m ropecli needle ...`, share the prompts.
    """
    from ropecli.commands.subject import open_subject
    from ropecli.data.sources import read_texts
    from ropecli.evaluation.retrieval.haystack import read_haystack
    from ropecli.evaluation.retrieval.prompts import RetrievalTask
    from ropecli.evaluation.retrieval.templates import choose_templates

    search = make_search(
        lengths,
        depths,
        mode=mode,
        chunk=chunk,
        candidates=candidates,
        trials=trials,
        seed=seed,
        output=output,
        plot=plot,
        keys=keys,
    )
    default = "code" if data in _CODE else "prose"
    templates = choose_templates(style, needle, question, default)
    templates.check_keys(keys)
    subject = open_subject(checkpoint, revision, method, factor, settings, factors_file, original_length)
    texts = read_texts(data, text_column=text_column, split=split)

    def make_task(pieces: "PieceTokenizer") -> "RetrievalTask":
        with progress_bar("reading documents", None) as step:
            haystack = read_haystack(texts, pieces, step)
        if len(haystack.ids) < search.lengths[-1]:
            warn(f"The text has {len(haystack.ids)} tokens, and is repeated to fill {search.lengths[-1]}.")
        return RetrievalTask("needle", templates, haystack, pieces, keys=keys, candidates=search.candidates, seed=seed)

    own = {"style": (style or default) if needle is None else None, "text_column": text_column, "split": split}
    return search.run(subject, data, make_task, own, dtype=dtype, device=device, attn=attn)
