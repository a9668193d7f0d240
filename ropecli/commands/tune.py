"""`ropecli tune`: tunes a scaling to a model and writes the checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_doc import Doc
from annotated_types import Ge
from typing_extensions import Unpack

from ropecli.atomic import refuse_existing
from ropecli.commands import options
from ropecli.commands.signature import Flag, command
from ropecli.errors import MethodError
from ropecli.messages import command_line, progress_bar, warn

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


TrainingData = Annotated[
    str,
    Flag("--data", "-d"),
    Doc("'demo-train', a file or folder of text or rows, or a Hub dataset id."),
    options.DATA,
]
Level = Annotated[
    str,
    Doc(
        "grid: search the constants of a method. heads: also train a gain and a phase per query head and rotary "
        "pair, folded into the weights, and the weights of the norms. lora: grid, then low-rank updates of queries "
        "and keys, merged. search: LongRoPE's evolutionary search for a factor per pair."
    ),
]
Objective = Annotated[
    str,
    Doc(
        "ppl: the loss on the last tokens of documents. longppl: the loss on the tokens that need a long context, "
        "see --evaluator. needle: the loss on a key hidden at the beginning of each document; --level search then "
        "searches like LongRoPE2."
    ),
]
Evaluator = Annotated[
    str | None,
    Doc("longppl: checkpoint with the same tokenizer that reads the target length; it finds the key tokens."),
]
Methods = Annotated[
    Sequence[str],
    Doc("Methods whose constants to search, separated by commas: yarn,ntk,abf,llama3."),
    options.SCALING,
]
Points = Annotated[int, Ge(1), Doc("Number of settings to try, over all methods; at least one per method.")]
ShortWeight = Annotated[
    float, Ge(0), Doc("Weight of the loss at the pretraining length, relative to that at the target.")
]
MaxDocuments = Annotated[
    int | None,
    Ge(1),
    Doc("Maximum number of documents to read. Default: 16, and as many as the steps need."),
    options.DATA,
]
Targets = Annotated[
    int | None,
    Ge(1),
    options.TOKENS,
    Doc("ppl: tokens to score per document. Default: half the pretraining length."),
]


class TuneOptions(options.TextOptions, options.LoadingOptions, total=False): ...


@command
def tune(
    checkpoint: options.Checkpoint,
    *,
    data: TrainingData,
    output: options.OutputFolder,
    factor: Annotated[float, Doc("Target length ÷ pretraining length."), options.SCALING],
    level: Level = "heads",
    objective: Objective = "ppl",
    evaluator: Evaluator = None,
    methods: Methods = ("yarn",),
    points: Points = 24,
    short_weight: ShortWeight = 0.25,
    steps: Annotated[int, Ge(1), Doc("heads, lora: maximum training steps.")] = 100,
    batch_size: Annotated[int, Ge(1), Doc("heads, lora: sequences per step.")] = 4,
    rank: Annotated[int, Ge(1), Doc("lora: rank.")] = 4,
    population: Annotated[int, Ge(1), Doc("search: population size.")] = 64,
    iterations: Annotated[int, Ge(0), Doc("search: number of generations.")] = 40,
    original_length: options.OriginalLength = None,
    max_documents: MaxDocuments = None,
    targets: Targets = None,
    seed: Annotated[int, Ge(0), Doc("Random seed.")] = 0,
    split: Annotated[str | None, Doc("Split of a Hub dataset. Default: train."), options.DATA] = None,
    weights: options.Weights = "link",
    resume: options.Resume = False,
    revision: options.Revision = None,
    **shared: Unpack[TuneOptions],
) -> TunedCheckpoint:
    """Tune a scaling to a model at a longer context, and write a checkpoint that stock software loads.

    Trains on most documents of --data and scores on the rest.
    """
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.evaluation.measure import interruptible
    from ropecli.evaluation.subject import Subject, refuse_attention
    from ropecli.evaluation.texts import count_documents, reads_everything
    from ropecli.resume import open_state, refuse_interrupted, remove_state
    from ropecli.tuning.procedure import write_tuned
    from ropecli.tuning.task import make_task
    from ropecli.tuning.tune_report import TRAINING
    from ropecli.tuning.tune_settings import TuneSettings

    link = options.is_link(weights)
    settings = TuneSettings(
        level,
        objective=objective,
        evaluator=evaluator,
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
    data = options.with_config(data, shared["dataset_config"])
    loading = options.loading_of(shared)
    folder = options.as_path(output)
    refuse_existing(folder)
    opened = open_checkpoint(checkpoint, weights=True, revision=revision)
    unusual = shared["device_map"] or "bits" in loading or "quantization_config" in opened.config
    if unusual and level in TRAINING:
        raise MethodError(
            f"--level {level} changes weights, which must be unquantized and on one device. Use --level grid or search."
        )
    refuse_interrupted(folder, resume)
    with progress_bar("reading documents", None) as step:
        task = make_task(
            opened,
            factor,
            data,
            settings,
            text_column=shared["text_column"],
            split=split,
            whole=reads_everything(data, max_documents),
            loading=loading,
            evaluator=open_checkpoint(evaluator, weights=True, adapters=True) if evaluator else None,
            advance=step,
        )
    if short := task.calibration.evaluated.too_short:
        warn(f"Skipping {count_documents(short)} shorter than {task.target_length} tokens.")
    refuse_attention(Subject(opened, task.baseline), shared["attn"])
    with interruptible(folder), open_state(folder, task.request()) as state:
        refuse_existing(folder)  # a run that was going on may have ended meanwhile
        result = _tune(task, state)
        for warning in result.plan.warnings:
            warn(warning)
        proved = write_tuned(result, folder, link=link, loading=loading if unusual else None, say=warn)
    remove_state(folder)
    return TunedCheckpoint(result, folder, proved)


def _tune(task: "TuningTask", state: Path) -> "Tuned":
    from ropecli.evaluation.subject import load
    from ropecli.reporting.tuning_progress import watching
    from ropecli.tuning.procedure import run_task

    model = load(task.checkpoint, task.tokenizer, **task.loading, whole=True)
    with watching(task) as on_point:
        return run_task(task, model, folder=state, command=list(command_line.get()), on_point=on_point)
