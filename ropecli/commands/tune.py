"""`ropecli tune`: tunes a scaling to a model and writes the checkpoint."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, Unpack

from annotated_doc import Doc
from annotated_types import Ge, Interval

from ropecli.atomic import refuse_existing
from ropecli.commands import options
from ropecli.errors import MethodError
from ropecli.evaluation import request
from ropecli.messages import command_line, progress_bar, say, warn
from ropecli.signature import Default, Flag, Only, command

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


class SettingOptions(TypedDict, total=False):
    """Fields of TuneSettings."""

    level: Annotated[
        str,
        Default("heads"),
        Doc(
            "grid: search the constants of a method. heads: also train a gain and a phase per query head and rotary "
            "pair, folded into the weights, and the weights of the norms. search: LongRoPE's evolutionary search for a "
            "factor per pair."
        ),
    ]
    points: Annotated[
        int,
        Default(24),
        Interval(ge=1, le=10_000),
        Only("level", ("grid", "heads")),
        Doc("Number of settings to try, over all methods; at least one each."),
    ]
    short_weight: Annotated[
        float,
        Default(0.25),
        Ge(0),
        Doc("Weight of the loss at the pretraining length, relative to that at the target."),
    ]
    steps: Annotated[int, Default(100), Ge(1), Only("level", ("heads",)), Doc("Maximum training steps.")]
    batch_size: Annotated[int, Default(4), Ge(1), Only("level", ("heads",)), Doc("Sequences per step.")]
    original_length: Annotated[request.OriginalLength, Default(None)]
    max_documents: Annotated[
        int | None,
        Default(None),
        Ge(1),
        Doc("Maximum number of documents to read. Default: 16, and as many as the steps need."),
        request.DATA,
    ]
    targets: Annotated[
        int | None,
        Default(None),
        Ge(1),
        request.TOKENS,
        Doc("Tokens to score per document, the last ones. Default: half the pretraining length."),
    ]
    seed: Annotated[int, Default(0), Ge(0), Doc("Random seed.")]


class TuneOptions(SettingOptions, request.TextOptions, request.LoadingOptions, total=False): ...


@command
def tune(
    checkpoint: request.CheckpointName,
    *,
    data: Annotated[
        str,
        Flag("--data", "-d"),
        Doc("'demo-train', a file or folder of text or rows, or a Hub dataset id."),
        request.DATA,
    ],
    output: options.OutputFolder,
    factor: Annotated[float, Doc("Target length ÷ pretraining length."), request.SCALING],
    methods: Annotated[
        Sequence[str],
        Doc("Methods whose constants to search, separated by commas: yarn,ntk,abf,llama3."),
        request.SCALING,
    ] = ("yarn",),
    population: Annotated[int, Interval(ge=1, le=10_000), Only("level", ("search",)), Doc("Population size.")] = 64,
    iterations: Annotated[
        int, Interval(ge=0, le=10_000), Only("level", ("search",)), Doc("Number of generations.")
    ] = 40,
    split: Annotated[str | None, Doc("Split of a dataset. Default: train."), request.DATA] = None,
    weights: options.Weights = "link",
    resume: options.Resume = False,
    revision: request.Revision = None,
    **shared: Unpack[TuneOptions],
) -> TunedCheckpoint:
    """Tune a scaling to a model at a longer context, and write a checkpoint that stock software loads.

    Trains on most documents of --data and scores on the rest.
    """
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.data.sources import TO_TRAIN
    from ropecli.evaluation.driver import interruptible
    from ropecli.evaluation.subject import Subject, load, refuse_attention
    from ropecli.evaluation.texts import count_documents
    from ropecli.live.proof import require_reading
    from ropecli.resume import open_state, refuse_interrupted, remove_state
    from ropecli.tuning.procedure import make_task, run_task, write_tuned
    from ropecli.tuning.task import TuneSettings

    link = options.is_link(weights)
    settings = TuneSettings(
        methods=tuple(dict.fromkeys(methods)),
        search_population=population,
        search_iterations=iterations,
        **{name: shared[name] for name in SettingOptions.__annotations__},  # type: ignore[literal-required]
    )
    source = replace(request.source_of(shared, data, split), splits=TO_TRAIN)
    if settings.max_documents is None:
        source = source.limited("--max-documents")
    loading = options.loading_of(shared)
    folder = options.as_path(output)
    refuse_existing(folder)
    opened = open_checkpoint(checkpoint, weights=True, revision=revision)
    quantized_or_spread = shared["device_map"] or "bits" in loading or "quantization_config" in opened.config
    if quantized_or_spread and settings.level == "heads":
        raise MethodError(
            "--level heads changes weights, which must be unquantized and on one device. Use --level grid or search."
        )
    refuse_interrupted(folder, resume)
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
        proved = write_tuned(tuned, folder, link=link, loading=loading if quantized_or_spread else None, say=warn)
    remove_state(folder)
    return TunedCheckpoint(tuned, folder, proved)


def _says_points(task: "TuningTask") -> "Callable[[Point], None]":
    """A function to call with every point: says the scores of heads, and of each point that is the best so far."""
    from ropecli.reporting.tuning_runs import ppl_words

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
