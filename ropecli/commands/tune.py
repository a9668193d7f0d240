"""`ropecli tune`: tunes a scaling to a model and writes the checkpoint."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
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
from ropecli.messages import command_line, progress_bar, say, warn

if TYPE_CHECKING:
    from ropecli.tuning.calibration import TuningTask
    from ropecli.tuning.procedure import Tuned
    from ropecli.tuning.task import Point


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
        "pair, folded into the weights, and the weights of the norms. search: LongRoPE's evolutionary search for a "
        "factor per pair."
    ),
]
Objective = Annotated[
    str,
    Doc(
        "ppl: the loss on the last tokens of documents. needle: the loss on a key hidden at the beginning of each "
        "document; --level search then searches like LongRoPE2."
    ),
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
    methods: Methods = ("yarn",),
    points: Points = 24,
    short_weight: ShortWeight = 0.25,
    steps: Annotated[int, Ge(1), Doc("heads: maximum training steps.")] = 100,
    batch_size: Annotated[int, Ge(1), Doc("heads: sequences per step.")] = 4,
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
    from ropecli.evaluation.subject import Subject, load, refuse_attention
    from ropecli.evaluation.texts import count_documents, reads_everything
    from ropecli.resume import open_state, refuse_interrupted, remove_state
    from ropecli.tuning.procedure import make_task, run_task, write_tuned
    from ropecli.tuning.task import TuneSettings

    link = options.is_link(weights)
    settings = TuneSettings(
        level,
        objective=objective,
        methods=tuple(dict.fromkeys(options.listed(methods))),
        points=points,
        short_weight=short_weight,
        targets=targets,
        max_documents=max_documents,
        original_length=original_length,
        seed=seed,
        steps=steps,
        batch_size=batch_size,
        search_population=population,
        search_iterations=iterations,
    )
    data = options.with_config(data, shared["dataset_config"])
    loading = options.loading_of(shared)
    folder = options.as_path(output)
    refuse_existing(folder)
    opened = open_checkpoint(checkpoint, weights=True, revision=revision)
    unusual = shared["device_map"] or "bits" in loading or "quantization_config" in opened.config
    if unusual and level == "heads":
        raise MethodError(
            "--level heads changes weights, which must be unquantized and on one device. Use --level grid or search."
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
            advance=step,
        )
    if short := task.calibration.evaluated.too_short:
        warn(f"Skipping {count_documents(short)} shorter than {task.target_length} tokens.")
    refuse_attention(Subject(opened, task.baseline), shared["attn"])
    with interruptible(folder), open_state(folder, task.request()) as state:
        refuse_existing(folder)  # a run that was going on may have ended meanwhile
        model = load(opened, task.tokenizer, **loading, whole=True)
        with _shown_progress(task) as on_point:
            tuned = run_task(task, model, folder=state, command=list(command_line.get()), on_point=on_point)
        for warning in tuned.plan.warnings:
            warn(warning)
        proved = write_tuned(tuned, folder, link=link, loading=loading if unusual else None, say=warn)
    remove_state(folder)
    return TunedCheckpoint(tuned, folder, proved)


@contextlib.contextmanager
def _shown_progress(task: "TuningTask") -> "Iterator[Callable[[Point], None]]":
    """Yield a function to call with every point. Shows the best one in the progress bar, and a line per round.

    A round is one level on one number of documents, and for the level search one iteration: its points are comparable.
    """
    from ropecli.reporting.tuning_runs import ppl_words

    points: list[Point] = []  # of this round, after the best of the last one if that was scored on the same documents
    count, current = 0, None

    def scores(point: "Point") -> str:
        at_target = f" and {ppl_words(point.score.target)} at {task.target_length}"
        at_short = f"{ppl_words(point.score.pretraining)} at {task.original_length}"
        return at_short + at_target * (task.target_length != task.original_length)

    def best() -> "Point":
        return min(points, key=lambda point: point.score.objective)

    def end_round() -> None:
        if current is None:
            return
        level, documents, iteration = current
        if level == "heads":
            say(f"{level}: best {scores(best())} at step {best().step}")
            return
        name = f"{level}, iteration {iteration}" if level == "search" else f"{level}, {documents} documents"
        say(f"{name}, {count} point{'s'[: count > 1]}: best {scores(best())}, {best().label}")

    def on_point(point: "Point") -> None:
        nonlocal count, current, points
        now = point.level, point.score.documents, point.step if point.level == "search" else 0
        if now != current:
            end_round()
            same_documents = current is not None and current[1] == now[1]
            points = [best()] if same_documents else []
            count, current = 0, now
        points.append(point)
        count += 1
        step(text=f"{point.level}: best {scores(best())}")
        if point.level == "heads":
            say(f"{point.level}, step {point.step}: {scores(point)}; best {scores(best())}")

    with progress_bar("measuring", None) as step:
        yield on_point
        end_round()
