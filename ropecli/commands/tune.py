"""`ropecli tune`: find what suits a model by measuring, and write it as a checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_doc import Doc
from annotated_types import Ge

from ropecli.atomic import refuse_existing
from ropecli.commands import options
from ropecli.commands.messages import command_line, progress_bar, warn
from ropecli.commands.options import Flag

if TYPE_CHECKING:
    from ropecli.tuning.procedure import Tuned
    from ropecli.tuning.task import TuningTask


@dataclass(frozen=True)
class TunedCheckpoint:
    """tuned: the plan and the report. proved: how many live rotary tables agree with the mathematics."""

    tuned: "Tuned"
    output: Path
    proved: int

    def as_json(self) -> dict[str, Any]:
        return self.tuned.report.as_json()


def tune(
    checkpoint: options.Checkpoint,
    *,
    data: Annotated[
        str, Flag("--data", "-d"), Doc("'demo-train', a file or folder of text or rows, or a Hub dataset id.")
    ],
    output: options.OutputFolder,
    factor: Annotated[float, Doc("Target length ÷ pretraining length.")],
    level: Annotated[
        str,
        Doc(
            "grid: a method's constants, by forward passes alone. heads: on top of them a gain and a phase of each "
            "query head and rotary pair, folded into the weights. lora: on top of them low-rank updates of queries and "
            "keys, merged. search: LongRoPE's evolutionary search for a factor of each pair."
        ),
    ] = "heads",
    methods: Annotated[
        Sequence[str],
        Flag("--methods", "-m"),
        Doc("Whose constants are tried, with commas between: yarn,ntk,abf,llama3."),
    ] = ("yarn",),
    points: Annotated[
        int, Ge(1), Doc("How many constants are tried, of all methods together; at least one of each.")
    ] = 24,
    short_weight: Annotated[
        float, Ge(0), Doc("What a nat at the pretraining length counts, against one at the target.")
    ] = 0.25,
    steps: Annotated[int, Ge(1), Doc("heads, lora: updates at most.")] = 100,
    batch_size: Annotated[int, Ge(1), Doc("heads, lora: sequences a step.")] = 4,
    rank: Annotated[int, Ge(1), Doc("lora: rank of its matrices.")] = 4,
    population: Annotated[int, Ge(1), Doc("search: how many it begins with.")] = 64,
    iterations: Annotated[int, Ge(0), Doc("search: generations.")] = 40,
    original_length: options.OriginalLength = None,
    max_documents: Annotated[int | None, Ge(1), Doc("Read at most so many; else 16 and what the steps take.")] = None,
    targets: Annotated[
        int | None, Ge(1), Doc("Tokens that are judged of each document; else half the pretraining length.")
    ] = None,
    seed: Annotated[int, Ge(0), Doc("Random seed.")] = 0,
    text_column: options.TextColumn = "text",
    split: Annotated[str | None, Doc("Of a Hub dataset; 'train' by default.")] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    attn: options.Attn = "auto",
    weights: options.Weights = "link",
    resume: Annotated[bool, Doc("Go on with an interrupted run of the same --output and request.")] = False,
    revision: options.Revision = None,
) -> TunedCheckpoint:
    """Find by measuring what suits a model at a longer context, and write the checkpoint; stock software loads it.

    The documents of --data are parted: most are learned from, some judge.
    """
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.commands.measuring import documents_are, interruptible
    from ropecli.commands.subject import refuse_attention
    from ropecli.resume import open_state, refuse_interrupted, remove_state
    from ropecli.tuning.procedure import write_tuned
    from ropecli.tuning.task import TuneSettings, make_task

    link = options.is_link(weights)
    settings = TuneSettings(
        level,
        methods=tuple(dict.fromkeys(options.listed(methods))),
        points=points,
        short_weight=short_weight,
        targets=targets,
        max_documents=max_documents,
        original_length=original_length,
        seed=seed,
        steps=steps,
        batch_size=batch_size,
        rank=rank,
        search_population=population,
        search_iterations=iterations,
    )
    folder = options.as_path(output)
    refuse_existing(folder)
    opened = open_checkpoint(checkpoint, weights=True, revision=revision)
    refuse_interrupted(folder, resume)
    with progress_bar("reading documents", None) as step:
        task = make_task(
            opened,
            factor,
            data,
            settings,
            text_column=text_column,
            split=split,
            loading={"dtype": dtype, "device": device, "attn": attn},
            advance=step,
        )
    if short := task.calibration.evaluated.too_short:
        warn(f"{documents_are(short)} shorter than {task.target_length} tokens and left out.")
    refuse_attention(opened, task.baseline, attn)
    with interruptible(folder), open_state(folder, task.request()) as state:
        refuse_existing(folder)  # a run that was going on may have ended meanwhile
        result = _tune(task, state)
        for warning in result.plan.warnings:
            warn(warning)
        proved = write_tuned(result, folder, link=link, say=warn)
    remove_state(folder)
    return TunedCheckpoint(result, folder, proved)


def _tune(task: "TuningTask", state: Path) -> "Tuned":
    from ropecli.commands.subject import load
    from ropecli.commands.tune_progress import watching
    from ropecli.tuning.procedure import run_task

    model = load(task.checkpoint, task.tokenizer, **task.loading, whole=True)
    with watching(task) as on_point:
        return run_task(task, model, folder=state, command=list(command_line.get()), on_point=on_point)
