"""`ropecli tune`: tunes a scaling to a model and writes the checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

from annotated_doc import Doc

from ropecli.atomic import refuse_existing
from ropecli.commands import options
from ropecli.errors import MethodError
from ropecli.evaluation import request
from ropecli.evaluation.loading_options import loading_of
from ropecli.messages import command_line, progress_bar, say, warn
from ropecli.signature import Flag, command
from ropecli.tuning.settings import TuneSettings

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


class TuneOptions(TuneSettings, request.TextOptions, request.LoadingOptions, total=False): ...


@command
def tune(
    checkpoint: request.CheckpointName,
    *,
    data: Annotated[
        str,
        Flag("--data", "-d"),
        Doc("'demo-train', a file or folder of text or rows, or a Hub dataset id."),
        request.IS_TRAINING_DATA,
        request.DATA,
    ],
    output: options.OutputFolder,
    factor: Annotated[float, Doc("Target length ÷ pretraining length."), request.SCALING],
    split: Annotated[str | None, Doc("Split of a dataset. Default: train."), request.DATA] = None,
    weights: options.Weights = "link",
    resume: options.Resume = False,
    revision: request.Revision = None,
    **shared: Unpack[TuneOptions],
) -> TunedCheckpoint:
    """Tune a scaling to a model, and write the checkpoint.

    Stock software loads it. Trains on most documents of --data and scores on the rest.
    """
    settings = TuneSettings(**{name: shared[name] for name in TuneSettings.__annotations__})  # type: ignore
    settings["methods"] = list(dict.fromkeys(settings["methods"]))
    loading = loading_of(shared)
    folder = options.as_path(output)
    refuse_existing(folder)
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.data.sources import TO_TRAIN
    from ropecli.resume import open_state, refuse_interrupted, remove_state
    from ropecli.tuning.task import refuse_untunable

    refuse_untunable(settings)
    source = replace(request.source_of(shared, data, split), splits=TO_TRAIN)
    if settings["max_documents"] is None:
        source = source.limited("--max-documents")
    opened = open_checkpoint(checkpoint, weights=True, revision=revision)
    quantized_or_spread = shared["device_map"] or "bits" in loading or "quantization_config" in opened.config
    if quantized_or_spread and settings["level"] == "heads":
        raise MethodError(
            "--level heads changes weights, which must be unquantized and on one device. Use --level grid or search."
        )
    refuse_interrupted(folder, resume)
    options.say_opening(checkpoint)
    from ropecli.evaluation.driver import interruptible
    from ropecli.evaluation.subject import Subject, load, refuse_attention
    from ropecli.evaluation.texts import count_documents
    from ropecli.live.proof import require_reading
    from ropecli.tuning.procedure import make_task, run_task, write_tuned

    with progress_bar("reading documents", None) as step:
        task = make_task(opened, factor, source, settings, loading=loading, advance=step)
    if short := task.calibration.evaluated.too_short:
        warn(f"Skipping {count_documents(short)} shorter than {task.positions.context_length} tokens.")
    refuse_attention(Subject(opened, task.baseline), shared["attn"])
    with interruptible(folder), open_state(folder, task.request()) as state:
        refuse_existing(folder)  # a run that was going on may have ended meanwhile
        model = load(opened, task.tokenizer, **loading, refuse_unused=True)
        require_reading(opened.config, model)
        command = list(command_line.get())
        tuned = run_task(task, model, folder=state, command=command, on_point=_says_points(task))
        for finding in tuned.plan.findings:
            warn(finding.message)
        proved = write_tuned(
            tuned, folder, link=weights == "link", loading=loading if quantized_or_spread else None, say=warn
        )
    remove_state(folder)
    return TunedCheckpoint(tuned, folder, proved)


def _says_points(task: "TuningTask") -> "Callable[[Point], None]":
    """A function to call with every point: says the scores of heads, and of each point that is the best so far."""
    from ropecli.reporting.report_tables import ppl_words

    points: list[Point] = []

    def scores(point: "Point") -> str:
        at_target = f" and {ppl_words(point.score.target)} at {task.positions.context_length}"
        at_short = f"{ppl_words(point.score.pretraining)} at {task.positions.pretraining_length}"
        return at_short + at_target * (task.positions.context_length != task.positions.pretraining_length)

    def on_point(point: "Point") -> None:
        points.append(point)
        comparable = [earlier for earlier in points if earlier.score.documents == point.score.documents]
        best = min(comparable, key=lambda earlier: earlier.score.objective)
        if point.level == "heads":
            say(f"{point.level}, step {point.step}: {scores(point)}; best {scores(best)}")
        elif best is point:
            say(f"{point.level}, {point.score.documents} documents: best {scores(point)}, {point.label}")

    return on_point
