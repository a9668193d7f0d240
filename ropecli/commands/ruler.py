"""`ropecli ruler`: finds the effective context length with RULER's tasks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Unpack

from annotated_doc import Doc
from annotated_types import Ge, Interval, MinLen

from ropecli.commands import options
from ropecli.commands.options import DATA
from ropecli.commands.signature import Flag, Only, command

if TYPE_CHECKING:
    from ropecli.reporting.outputs import Reports


PromptLengths = Annotated[
    Sequence[options.Length] | None,
    MinLen(1),
    Flag("--lengths", "-l", metavar="TOKENS,..."),
    Doc(
        "Exact lengths of the prompt with the tokens that may be generated, such as 4k,8k,16k. Default: doubling "
        "from a quarter of the pretraining length to the context length."
    ),
]
Tasks = Annotated[
    Sequence[str] | None,
    Flag("--tasks", "-t", metavar="TASK,..."),
    Doc(
        "niah_single_1 to _3, niah_multikey_1 to _3, niah_multivalue, niah_multiquery, vt, cwe, fwe: RULER's tasks but "
        "qa_1 and qa_2. Default: all whose prompts fit."
    ),
]
Mode = Annotated[
    str,
    Doc(
        "generate: greedy answers, scored as published. rank: the right answers must have the highest "
        f"log-probabilities among wrong ones; works for base models. {options.MODE_RULE}"
    ),
]
Threshold = Annotated[
    float | None,
    Interval(gt=0, le=1),
    Doc("Mean score that the effective length requires, 0 to 1. Default: 85.6% of the score at the shortest length."),
]
EssayText = Annotated[
    str,
    Flag("--data", "-d"),
    Doc("Text of the essay: a file or folder, a Hub dataset id, or 'demo'. RULER takes Paul Graham's essays."),
    DATA,
]


class RulerOptions(options.EvalTextOptions, options.InMemoryOptions, options.MeasuringOptions, total=False): ...


@command
def ruler(
    checkpoints: options.CheckpointNames,
    *,
    lengths: PromptLengths = None,
    tasks: Tasks = None,
    samples: Annotated[options.Samples, Doc("Prompts per task and length. RULER's tables have 500.")] = 50,
    mode: Mode = "generate",
    chat_template: options.ChatTemplate = "auto",
    threshold: Threshold = None,
    data: EssayText = "demo",
    seed: Annotated[int, Ge(0), Doc("Random seed of the prompts.")] = 0,
    batch_size: Annotated[int, Ge(1), Only("mode", ("generate",)), Doc("Prompts at once."), options.LOADING] = 1,
    **shared: Unpack[RulerOptions],
) -> "Reports":
    """Find the effective context length: RULER's tasks at several lengths.

    The effective length is the longest one up to which the mean score stays at or above --threshold.

    Several processes, started by `accelerate launch -m ropecli ruler ...`, share the prompts.
    """
    from ropecli.evaluation.tasks.ruler import RulerChoice, make_ruler
    from ropecli.reporting.outputs import by_checkpoint, measure

    choice = RulerChoice(
        options.source_of(data, shared, shared["split"]),
        lengths,
        tasks,
        samples,
        mode,
        chat_template=chat_template,
        threshold=threshold,
        seed=seed,
    )
    return measure(
        checkpoints,
        lambda subjects, workers, outputs: by_checkpoint(subjects, lambda scalings: make_ruler(scalings, choice)),
        options.reader_factory_of(shared, batch_size),
        shared,
    )
