"""`ropecli compare`: compares methods, factors and checkpoints."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_doc import Doc
from annotated_types import Ge, Gt, MinLen
from typing_extensions import Unpack

from ropecli.commands import options
from ropecli.commands.messages import warn
from ropecli.commands.options import Flag
from ropecli.commands.outputs import refuse_outputs
from ropecli.commands.signature import command
from ropecli.errors import MethodError, did_you_mean

if TYPE_CHECKING:
    from ropecli.checkpoint.opening import Checkpoint
    from ropecli.checkpoint.patch_plan import PatchPlan
    from ropecli.commands.measuring import PerplexityRun
    from ropecli.commands.ruler_run import RulerRun
    from ropecli.commands.subject import Subject
    from ropecli.evaluation.eval_report import EvalReport, RulerReport
    from ropecli.evaluation.processes import Workers
    from ropecli.evaluation.protocols import Protocol
    from ropecli.evaluation.ruler.measure import RulerScores
    from ropecli.evaluation.saved_progress import EvalProgress

    Plans = Sequence[PatchPlan | None]
LONGPPL, RULER = "longppl", "ruler"
MEASURES = ("ppl", LONGPPL, RULER)


@dataclass(frozen=True)
class Comparison:
    """reports: sorted by checkpoint and measure, then method and factor; those of ruler last. plot: the drawn file."""

    reports: "list[EvalReport | RulerReport]"
    plot: Path | None = None

    def as_json(self) -> list[dict[str, Any]]:
        return [report.as_json() for report in self.reports]


Methods = Annotated[Sequence[str], Doc("Methods, separated by commas; as-is: no patch."), options.SCALING]
Factors = Annotated[
    Sequence[Annotated[float, Gt(0)]],
    MinLen(1),
    Flag("--factors", "-f"),
    Doc("Factors, separated by commas."),
    options.SCALING,
]
Measures = Annotated[
    Sequence[str],
    Flag("--measure", metavar="MEASURE,..."),
    Doc(
        "ppl: perplexity by --protocol. longppl: perplexity of key tokens, see --evaluator and --keys. ruler: the "
        "mean score of RULER's tasks."
    ),
]
Tasks = Annotated[
    Sequence[str] | None, Flag("--tasks", metavar="TASK,..."), Doc("ruler: tasks. Default: all whose prompts fit.")
]
Plot = Annotated[
    str | Path | None, Flag("--plot", metavar="FILE"), Doc("Draw the result: .png, .svg or .pdf."), options.OUTPUT
]


class CompareOptions(options.DocumentOptions, options.PerplexityOptions, total=False): ...


@command
def compare(
    checkpoints: options.Checkpoints,
    *,
    methods: Methods = ("none", "linear", "ntk", "dynamic", "llama3", "ntk-by-parts", "yarn"),
    factors: Factors = (4,),
    settings: options.SeveralSettings = None,
    measure: Measures = ("ppl",),
    tasks: Tasks = None,
    samples: Annotated[int, Ge(1), Doc("ruler: prompts per task and length.")] = 20,
    mode: Annotated[str, Doc(f"ruler: rank, which works for base models, or generate. {options.MODE_RULE}")] = "rank",
    plot: Plot = None,
    **shared: Unpack[CompareOptions],
) -> Comparison:
    """Compare scaling methods by perplexity, without writing checkpoints.

    Loads each model once and patches it in memory. With several checkpoints, tries every method on each.
    """
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.commands.measuring import DataChoice, interruptible, prepare_run
    from ropecli.commands.ruler_run import choose_ruler, prepare_ruler
    from ropecli.commands.scalings import method_specs
    from ropecli.commands.subject import reach_of, refuse_attention
    from ropecli.evaluation.comparison import plan_comparison
    from ropecli.evaluation.eval_report import RulerReport, write_report
    from ropecli.evaluation.processes import join_workers
    from ropecli.evaluation.protocols import Protocol
    from ropecli.evaluation.ruler.measure import RulerScores
    from ropecli.evaluation.saved_progress import EvalProgress
    from ropecli.reporting.figures.style import refuse_unknown_ending
    from ropecli.reporting.plot_kinds import draw_reports
    from ropecli.resume import open_state, refuse_interrupted, remove_state

    report_file, picture, key_file = map(options.optional_path, (shared["output"], plot, shared["keys"]))
    refuse_unknown_ending(picture)
    refuse_outputs(report_file, picture, key_file)
    refuse_interrupted(report_file, shared["resume"])
    loading = options.loading_of(shared)
    asked = Protocol(shared["protocol"], shared["stride"], shared["targets"])
    measures = _measures(measure, picture)
    choice, lengths = DataChoice.of(shared), shared["lengths"]
    evaluator, keys, revision = shared["evaluator"], shared["keys"], shared["revision"]
    ruler = choose_ruler(
        choice.source,
        lengths,
        tasks,
        samples=samples,
        mode=mode,
        chunk=shared["chunk"],
        batch_size=shared["batch_size"],
        text_column=choice.text_column,
        split=choice.split,
        loading=loading,
        skip_short=True,
    )
    names = list(dict.fromkeys(options.listed(checkpoints)))
    if revision and len(names) > 1:
        raise MethodError("--revision works with one checkpoint only.")
    opened = [open_checkpoint(name, weights=True, revision=revision, adapters=True) for name in names]
    specs = method_specs(options.listed(methods), sorted(set(factors)), settings)
    plans = [plan_comparison(one, specs) for one in opened]
    for one, plan in ((one, plan) for one, own in zip(opened, plans, strict=True) for plan in own):
        refuse_attention(one, plan, shared["attn"])
    for warning in dict.fromkeys(text for one, own in zip(opened, plans, strict=True) for text in _warnings(one, own)):
        warn(warning)
    reaches = [reach_of(one, plan) for one, own in zip(opened, plans, strict=True) for plan in own]
    reach = min(shortest for shortest, _ in reaches), max(longest for _, longest in reaches)
    workers = join_workers()
    runs: list[list[PerplexityRun]] = [[] for _ in opened]
    for wanted in _protocols(measures, asked, evaluator, keys):
        before: list[PerplexityRun] = []
        of_keys: dict[str, Any] = {"evaluator": evaluator, "key_file": key_file} if wanted.name == LONGPPL else {}
        for one, own in zip(opened, runs, strict=True):
            run = prepare_run(
                one,
                choice,
                lengths,
                wanted,
                reach=reach,
                chunk=shared["chunk"],
                batch_size=shared["batch_size"],
                loading=loading,
                workers=workers,
                before=before,
                **of_keys,
            )
            before.append(run)
            own.append(run)
    rulers = [prepare_ruler(one, reach, ruler) if RULER in measures else None for one in opened]
    request = _request(opened, plans, runs, rulers)
    state = open_state(report_file, request, workers.rank) if report_file else nullcontext()
    reports: list[EvalReport | RulerReport] = []
    with interruptible(report_file), state as folder:
        progress, scores = EvalProgress(folder, workers.rank), RulerScores(folder, workers.rank)
        for index, (one, own_plans) in enumerate(zip(opened, plans, strict=True)):
            measurement = _Measurement(one, own_plans, runs[index], rulers[index], workers, f"{index}: ")
            reports += measurement.reports(loading, progress, scores)
    reports.sort(key=lambda report: isinstance(report, RulerReport))
    if workers.first:
        if picture:
            draw_reports(reports, picture)
        if report_file:
            write_report(report_file, [report.as_json() for report in reports])
        remove_state(report_file)
    return Comparison(reports, picture)


def _measures(names: Sequence[str], picture: Path | None) -> list[str]:
    """Raises MethodError for an unknown measure, or a plot of several."""
    found = list(dict.fromkeys(options.listed(names)))
    for name in found:
        if name not in MEASURES:
            raise MethodError(f"Unknown measure {name!r}. Known: {', '.join(MEASURES)}.{did_you_mean(name, MEASURES)}")
    if picture and len(found) > 1:
        raise MethodError("--plot draws one measure. For several, write them with --output, and `ropecli report`.")
    return found


def _protocols(
    measures: Sequence[str], asked: "Protocol", evaluator: str | None, keys: str | Path | None
) -> "list[Protocol]":
    """The protocols of the perplexities. Raises MethodError for key tokens that none of them takes."""
    from ropecli.commands.longppl import refuse_key_options
    from ropecli.evaluation.protocols import Protocol

    found = [Protocol(LONGPPL) if name == LONGPPL else asked for name in measures if name != RULER]
    if not any(one.name == LONGPPL for one in found):
        refuse_key_options(asked, evaluator, keys)
    return found


def _warnings(checkpoint: "Checkpoint", plans: "Plans") -> list[str]:
    """Warnings of the plans, and of a shipped scaling that they replace."""
    from ropecli.checkpoint.state import read_state
    from ropecli.commands.scalings import AS_IS

    shipped = read_state(checkpoint).main.spec
    own = [text for plan in plans if plan for text in plan.settings_warnings]
    kept = any(plan is None or plan.spec.method == shipped.method for plan in plans)
    if shipped.method.name != "none" and not kept:
        own.append(
            f"{checkpoint.name} ships with {shipped.method} ×{shipped.factor:g}, which every method here replaces. To "
            f"measure it too, add {AS_IS} to --methods."
        )
    return own


@dataclass(frozen=True)
class _Measurement:
    """One checkpoint, which is loaded once. part: begins the names under which its results are saved."""

    checkpoint: "Checkpoint"
    plans: "Plans"
    runs: "list[PerplexityRun]"
    ruler: "RulerRun | None"
    workers: "Workers"
    part: str

    def reports(
        self, loading: dict[str, Any], progress: "EvalProgress", scores: "RulerScores"
    ) -> "list[EvalReport | RulerReport]":
        """Measure every plan, one measure after the other."""
        from ropecli.commands.subject import Subject, load, subject_as_is
        from ropecli.live.rotary import unpatched_after

        tokenizer = self.runs[0].tokenizer if self.runs else self.ruler.maker.tokenizer.tokenizer  # type: ignore[union-attr]
        model = load(self.checkpoint, tokenizer, **loading)
        subjects = [
            Subject(self.checkpoint, plan.spec, plan.ropes[plan.scaled[0]], plan, ())
            if plan
            else subject_as_is(self.checkpoint)
            for plan in self.plans
        ]
        found: list[EvalReport | RulerReport] = []
        for run in self.runs:
            found += self._perplexity(run, model, subjects, progress)
        if self.ruler:
            for index, subject in enumerate(subjects):
                with unpatched_after(model):
                    switching = subject.patch(model)
                    part = f"{self.part}{index}"
                    found.append(self.ruler.measure(subject, model, scores, part, self.workers, switching=switching))
        return found

    def _perplexity(
        self, run: "PerplexityRun", model: Any, subjects: "list[Subject]", progress: "EvalProgress"
    ) -> "list[EvalReport]":
        from ropecli.evaluation.comparison import compare_methods, plan_varies_with_length
        from ropecli.live.rotary import follows_length

        follows = [
            plan_varies_with_length(plan) if plan else follows_length(model, run.lengths[-1]) for plan in self.plans
        ]
        part = self.part if run is self.runs[0] else f"{self.part}{run.protocol.name} "
        with run.scoring(progress, follows) as scoring:
            results = compare_methods(model, self.plans, run.documents, run.lengths, part=part, **scoring)
        return [run.report(subject, model, rows) for subject, rows in zip(subjects, results, strict=True)]


def _request(
    opened: "Sequence[Checkpoint]",
    plans: "Sequence[Plans]",
    runs: "Sequence[list[PerplexityRun]]",
    rulers: "Sequence[RulerRun | None]",
) -> dict[str, Any]:
    """Everything that the numbers depend on."""
    from ropecli.commands.subject import fingerprint

    return {
        "checkpoints": [one.digest() for one in opened],
        "scalings": [[fingerprint(plan) for plan in own] for own in plans],
        "runs": [run.request() for own in runs for run in own],
        "ruler": [run.request() for run in rulers if run],
    }
