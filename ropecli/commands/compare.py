"""`ropecli compare`: compares methods, factors and checkpoints."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

from annotated_doc import Doc
from annotated_types import Gt, MinLen

from ropecli.commands import options
from ropecli.commands.options import Flag
from ropecli.commands.signature import command
from ropecli.errors import MethodError, did_you_mean
from ropecli.messages import warn

if TYPE_CHECKING:
    from ropecli.checkpoint.opening import Checkpoint
    from ropecli.checkpoint.patch_plan import PatchPlan
    from ropecli.evaluation.driver import Task
    from ropecli.evaluation.subject import Subject
    from ropecli.reporting.outputs import Reports
    from ropecli.scaling.spec import ScalingSpec

    SubjectTasks = Sequence[tuple[Task, Any]]
    """The task and the tokenizer of each subject."""

MEASURES = ("ppl", "longppl", "recall", "needle", "ruler")
Methods = Annotated[Sequence[str], Doc("Methods, separated by commas; as-is: no patch."), options.SCALING]
FactorList = Annotated[
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
        "ppl: perplexity by --protocol. longppl: perplexity of key tokens, see --evaluator and --keys. recall: "
        "whether far text is used, see --protocol. needle: keys found in --data. ruler: mean score of RULER's tasks."
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
    checkpoints: options.CheckpointNames,
    *,
    methods: Methods = ("none", "linear", "ntk", "dynamic", "llama3", "ntk-by-parts", "yarn"),
    factors: FactorList = (4,),
    settings: options.SeveralSettings = None,
    measure: Measures = ("ppl",),
    tasks: Tasks = None,
    samples: Annotated[options.Samples, Doc("needle, ruler: prompts per task, length and depth.")] = 20,
    mode: Annotated[
        str,
        Doc(
            f"needle, ruler: rank, which works for base models, or generate. {options.MODE_RULE} recall: generate for "
            "greedy copies, otherwise losses."
        ),
    ] = "rank",
    plot: Plot = None,
    **shared: Unpack[CompareOptions],
) -> "Reports":
    """Compare scaling methods by perplexity, recall and other measures, without writing checkpoints.

    Loads each model once and patches it in memory. With several checkpoints, tries every method on each.
    """
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.evaluation.protocols import Protocol

    protocol = Protocol(shared["protocol"], shared["stride"], shared["targets"])

    from ropecli.checkpoint.scalings import method_specs
    from ropecli.evaluation.driver import Job, make_reports
    from ropecli.evaluation.processes import join_workers
    from ropecli.evaluation.subject import Subject, default_lengths, refuse_attention, refuse_several_revisions
    from ropecli.evaluation.tasks.key_tokens import refuse_key_token_options
    from ropecli.evaluation.tasks.perplexity import make_perplexity
    from ropecli.evaluation.tasks.recall import make_recall
    from ropecli.evaluation.tasks.retrieval import RetrievalChoice, make_needle
    from ropecli.evaluation.tasks.ruler import RulerChoice, make_ruler
    from ropecli.reporting.outputs import Outputs

    outputs = Outputs(*map(options.optional_path, (shared["output"], plot, shared["keys"])))
    outputs.refuse_overwriting(resume=shared["resume"], overwrite=shared["overwrite"])
    factory = options.reader_factory_of(shared, shared["batch_size"], shared["evaluator"])
    texts = options.texts_of(shared)
    names, measures = list(dict.fromkeys(options.listed(checkpoints))), list(dict.fromkeys(options.listed(measure)))
    for name in measures:
        if name not in MEASURES:
            raise MethodError(f"Unknown measure {name!r}. Known: {', '.join(MEASURES)}.{did_you_mean(name, MEASURES)}")
    if outputs.plot and len(measures) > 1:
        raise MethodError("--plot draws one measure. For several, write them with --output, and `ropecli report`.")
    refuse_several_revisions(names, shared["revision"])
    evaluator = shared["evaluator"]
    if "longppl" not in (*measures, *([protocol.name] if "ppl" in measures else [])):
        refuse_key_token_options(protocol, evaluator, outputs.keys)

    needed = {"weights": factory.loads_weights, "tokenizer": True}
    opened = [open_checkpoint(name, **needed, revision=shared["revision"], adapters=True) for name in names]
    specs = method_specs(options.listed(methods), sorted(set(factors)), settings)
    subjects = [Subject(checkpoint, plan) for checkpoint in opened for plan in plan_comparison(checkpoint, specs)]
    for subject in subjects:
        refuse_attention(subject, shared["attn"])
    for warning in dict.fromkeys(text for checkpoint in opened for text in _warnings(checkpoint, subjects)):
        warn(warning)
    workers = join_workers()

    lengths = shared["lengths"] or default_lengths(subjects)
    choices: dict[str, Any] = {"samples": samples, "mode": mode, "skip_short": True}
    ruler = RulerChoice(texts.source, lengths, None if tasks is None else options.listed(tasks), **choices)
    search = RetrievalChoice(lengths, **choices)

    def perplexity(protocol: Protocol) -> "SubjectTasks":
        keys: dict[str, Any] = {"evaluator": evaluator, "key_file": outputs.keys, "output": outputs.report}
        keys = keys if protocol.name == "longppl" else {}
        if protocol.name == "recall":
            return make_recall(subjects, subjects[0], texts, shared["lengths"], generate=mode == "generate")
        return make_perplexity(subjects, texts, shared["lengths"], protocol, factory, workers, **keys)

    makers: dict[str, Callable[[], SubjectTasks]] = {
        "ppl": lambda: perplexity(protocol),
        "longppl": lambda: perplexity(Protocol("longppl")),
        "recall": lambda: perplexity(Protocol("recall")),
        "needle": lambda: _by_checkpoint(subjects, lambda subject: make_needle(subject, search, texts.source)),
        "ruler": lambda: _by_checkpoint(subjects, lambda subject: make_ruler(subject, ruler)),
    }
    made = [makers[name]() for name in measures]
    jobs = [
        Job(subject, [task for task, _ in of_subject], of_subject[0][1])
        for subject, of_subject in zip(subjects, zip(*made, strict=True), strict=True)
    ]
    reports = make_reports(jobs, factory, outputs.report, workers)
    by_measure = [report for place in range(len(measures)) for report in reports[place :: len(measures)]]
    return outputs.write(by_measure, workers)


def plan_comparison(checkpoint: "Checkpoint", specs: "Iterable[ScalingSpec | None]") -> "list[PatchPlan | None]":
    """One plan per distinct spec; None for the unchanged checkpoint.

    Methods that scale nothing appear once. Raises MethodError.
    """
    from ropecli.checkpoint.patch_plan import make_plan
    from ropecli.scaling.none import LENGTH_ONLY
    from ropecli.scaling.spec import make_spec

    distinct: list[ScalingSpec | None] = []
    for spec in specs:
        spec = make_spec(spec.method.name) if spec and spec.method.name in LENGTH_ONLY else spec
        if spec not in distinct:
            distinct.append(spec)
    return [make_plan(checkpoint, spec) if spec else None for spec in distinct]


def _by_checkpoint(subjects: "Sequence[Subject]", make: "Callable[[Subject], tuple[Task, Any]]") -> "SubjectTasks":
    """The scalings of a checkpoint share its task."""
    made = {id(subject.checkpoint): subject for subject in subjects}
    tasks = {key: make(subject) for key, subject in made.items()}
    return [tasks[id(subject.checkpoint)] for subject in subjects]


def _warnings(checkpoint: "Checkpoint", subjects: "Sequence[Subject]") -> list[str]:
    """Warnings of the plans, and of a shipped scaling that they replace."""
    from ropecli.checkpoint.scalings import AS_IS
    from ropecli.checkpoint.state import read_state

    plans = [subject.plan for subject in subjects if subject.checkpoint is checkpoint]
    shipped = read_state(checkpoint).positions.main.spec
    warnings = [finding.message for plan in plans if plan for finding in plan.findings if finding.about == "files"]
    kept = any(plan is None or plan.spec.method == shipped.method for plan in plans)
    if shipped.method.name != "none" and not kept:
        warnings.append(
            f"{checkpoint.name} ships with {shipped.method} ×{shipped.factor:g}, which every method here replaces. To "
            f"measure it too, add {AS_IS} to --methods."
        )
    return warnings
