"""`ropecli compare`: compares methods, factors and checkpoints."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_doc import Doc

from ropecli.commands import options
from ropecli.commands.messages import warn
from ropecli.commands.options import Flag
from ropecli.commands.outputs import refuse_outputs
from ropecli.errors import MethodError

if TYPE_CHECKING:
    from ropecli.checkpoint.opening import Checkpoint
    from ropecli.checkpoint.patch_plan import PatchPlan
    from ropecli.commands.measuring import PerplexityRun
    from ropecli.evaluation.eval_report import EvalReport
    from ropecli.evaluation.saved_progress import EvalProgress

    Plans = Sequence[PatchPlan | None]


@dataclass(frozen=True)
class Comparison:
    """reports: sorted by checkpoint, then method and factor. plot: the drawn file."""

    reports: "list[EvalReport]"
    plot: Path | None = None

    def as_json(self) -> list[dict[str, Any]]:
        return [report.as_json() for report in self.reports]


def compare(
    checkpoints: Annotated[
        Sequence[str],
        Flag("checkpoints", metavar="CHECKPOINT..."),
        Doc("Folders, Hub ids (owner/name), or 'demo'."),
    ],
    *,
    data: options.Data,
    methods: Annotated[Sequence[str], Doc("Methods, separated by commas; as-is: no patch."), options.SCALING] = (
        "none",
        "linear",
        "ntk",
        "dynamic",
        "llama3",
        "ntk-by-parts",
        "yarn",
    ),
    factors: Annotated[
        Sequence[float], Flag("--factors", "-f"), Doc("Factors, separated by commas."), options.SCALING
    ] = (4,),
    lengths: options.Lengths = None,
    settings: options.SeveralSettings = None,
    protocol: options.ProtocolName = "prefix",
    stride: options.Stride = None,
    targets: options.Targets = None,
    evaluator: options.Evaluator = None,
    keys: options.KeysFile = None,
    max_documents: options.MaxDocuments = None,
    min_tokens: options.MinTokens = None,
    max_tokens: options.MaxTokens = None,
    text_column: options.TextColumn = "text",
    dataset_config: options.DatasetConfig = None,
    split: options.Split = None,
    chunk: options.Chunk = None,
    batch_size: options.BatchSize = 1,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
    max_memory: options.MaxMemory = None,
    load_in_8bit: options.LoadIn8bit = False,
    load_in_4bit: options.LoadIn4bit = False,
    attn: options.Attn = "auto",
    plot: Annotated[
        str | Path | None, Flag("--plot", metavar="FILE"), Doc("Draw the result: .png, .svg or .pdf."), options.OUTPUT
    ] = None,
    output: options.ReportFile = None,
    resume: options.Resume = False,
    revision: options.Revision = None,
) -> Comparison:
    """Compare scaling methods by perplexity, without writing checkpoints.

    Loads each model once and patches it in memory. With several checkpoints, tries every method on each.
    """
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.commands.measuring import DataChoice, interruptible, prepare_run
    from ropecli.commands.scalings import method_specs
    from ropecli.commands.subject import reach_of, refuse_attention
    from ropecli.evaluation.comparison import plan_comparison
    from ropecli.evaluation.eval_report import write_report
    from ropecli.evaluation.processes import join_workers
    from ropecli.evaluation.protocols import Protocol
    from ropecli.evaluation.saved_progress import open_progress
    from ropecli.reporting.figures.style import refuse_unknown_ending
    from ropecli.reporting.plot_kinds import draw_reports
    from ropecli.resume import refuse_interrupted, remove_state

    report_file, picture = options.optional_path(output), options.optional_path(plot)
    refuse_unknown_ending(picture)
    refuse_outputs(report_file, picture)
    refuse_interrupted(report_file, resume)
    loading = options.loading_of(dtype, device, attn, device_map, max_memory, load_in_8bit, load_in_4bit)
    asked = Protocol(protocol, stride, targets)
    names = list(dict.fromkeys(options.listed(checkpoints)))
    if revision and len(names) > 1:
        raise MethodError("--revision works with one checkpoint only.")
    opened = [open_checkpoint(name, weights=True, revision=revision, adapters=True) for name in names]
    specs = method_specs(options.listed(methods), options.sorted_numbers(factors, "--factors"), settings)
    plans = [plan_comparison(one, specs) for one in opened]
    for one, plan in ((one, plan) for one, own in zip(opened, plans, strict=True) for plan in own):
        refuse_attention(one, plan, attn)
    for warning in dict.fromkeys(text for one, own in zip(opened, plans, strict=True) for text in _warnings(one, own)):
        warn(warning)
    reaches = [reach_of(one, plan) for one, own in zip(opened, plans, strict=True) for plan in own]
    reach = min(shortest for shortest, _ in reaches), max(longest for _, longest in reaches)
    workers = join_workers()
    runs: list[PerplexityRun] = []
    for one in opened:
        run = prepare_run(
            one,
            DataChoice(
                options.with_config(data, dataset_config), text_column, split, max_documents, min_tokens, max_tokens
            ),
            lengths,
            asked,
            reach=reach,
            chunk=chunk,
            batch_size=batch_size,
            loading=loading,
            workers=workers,
            before=runs,
            evaluator=evaluator,
            key_file=keys,
        )
        runs.append(run)
    request = _request(opened, plans, runs)
    reports: list[EvalReport] = []
    with interruptible(report_file), open_progress(report_file, request, workers.rank) as progress:
        for index, (one, own, run) in enumerate(zip(opened, plans, runs, strict=True)):
            reports += _measure(one, own, run, progress, f"{index}: ")
    if workers.first:
        if picture:
            draw_reports(reports, picture)
        if report_file:
            write_report(report_file, [report.as_json() for report in reports])
        remove_state(report_file)
    return Comparison(reports, picture)


def _warnings(checkpoint: "Checkpoint", plans: "Plans") -> list[str]:
    """Warnings of the plans, and of a shipped scaling that they replace."""
    from ropecli.checkpoint.state import read_state
    from ropecli.commands.scalings import AS_IS

    shipped = read_state(checkpoint).main.spec
    own = [text for plan in plans if plan for text in plan.settings_warnings]
    if shipped.method.name != "none" and None not in plans:
        own.append(
            f"{checkpoint.name} ships with {shipped.method} ×{shipped.factor:g}, which every method here replaces. To "
            f"measure it too, add {AS_IS} to --methods."
        )
    return own


def _measure(
    checkpoint: "Checkpoint",
    plans: "Plans",
    run: "PerplexityRun",
    progress: "EvalProgress",
    part: str,
) -> "list[EvalReport]":
    """Measure one checkpoint with every plan."""
    from ropecli.commands.subject import Subject, load, subject_as_is
    from ropecli.evaluation.comparison import compare_methods, plan_varies_with_length
    from ropecli.live.rotary import follows_length

    model = load(checkpoint, run.tokenizer, **run.loading)
    follows = [plan_varies_with_length(plan) if plan else follows_length(model, run.lengths[-1]) for plan in plans]
    with run.scoring(progress, follows) as scoring:
        results = compare_methods(model, plans, run.documents, run.lengths, part=part, **scoring)
    subjects = [
        Subject(checkpoint, plan.spec, plan.ropes[plan.scaled[0]], plan, ()) if plan else subject_as_is(checkpoint)
        for plan in plans
    ]
    return [run.report(subject, model, rows) for subject, rows in zip(subjects, results, strict=True)]


def _request(
    opened: "Sequence[Checkpoint]", plans: "Sequence[Plans]", runs: "Sequence[PerplexityRun]"
) -> dict[str, Any]:
    """Everything that the numbers depend on."""
    from ropecli.commands.subject import fingerprint

    return {
        "checkpoints": [one.digest() for one in opened],
        "scalings": [[fingerprint(plan) for plan in own] for own in plans],
        "data": [run.fingerprint for run in runs],
        **{key: value for key, value in runs[0].request().items() if key != "data"},
    }
