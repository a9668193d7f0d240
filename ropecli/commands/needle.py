"""`ropecli needle`: measures whether a model finds a key in a text."""

from typing import TYPE_CHECKING, Annotated, Unpack

from annotated_doc import Doc
from annotated_types import Ge

from ropecli.commands import options
from ropecli.commands.signature import Flag, command

if TYPE_CHECKING:
    from ropecli.reporting.outputs import Reports


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
NeedleTemplate = Annotated[
    str | None,
    Flag("--needle", metavar="TEMPLATE"),
    Doc("Your own needle, with {key}, and {name} if --num-needles is above 1."),
]
QuestionTemplate = Annotated[
    str | None,
    Flag("--question", metavar="TEMPLATE"),
    Doc("For --needle: the last line, which the key completes, with {name}."),
]
NumNeedles = Annotated[
    int, Ge(1), Doc("Number of needles with different names. One is asked for, the others are spread evenly.")
]


class NeedleOptions(options.EvalTextOptions, options.InMemoryOptions, options.SearchOptions, total=False): ...


@command
def needle(
    checkpoints: options.CheckpointNames,
    *,
    data: SearchedText = "demo",
    style: Style = None,
    needle: NeedleTemplate = None,
    question: QuestionTemplate = None,
    num_needles: NumNeedles = 1,
    **shared: Unpack[NeedleOptions],
) -> "Reports":
    """Measure whether a model finds a needle in a text of your choice, by length and depth.

    The key is a random number of five digits. A model that confuses several needles scores 1 ÷ --num-needles.

    Several processes, started by `accelerate launch -m ropecli needle ...`, share the prompts.
    """
    from ropecli.evaluation.retrieval_prompts import choose_templates, default_style
    from ropecli.evaluation.tasks.retrieval import make_needle
    from ropecli.reporting.outputs import by_checkpoint, measure

    source = options.source_of(data, shared, shared["split"])
    choice = options.retrieval_of(shared, num_needles)
    default = default_style(source.place)
    templates = choose_templates(style, needle, question, default)
    templates.check_needles(num_needles)
    style = (style or default) if needle is None else None

    return measure(
        checkpoints,
        lambda subjects, workers, outputs: by_checkpoint(
            subjects, lambda scalings: make_needle(scalings, choice, source, templates, style=style)
        ),
        options.reader_factory_of(shared),
        shared,
    )
