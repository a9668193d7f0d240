"""`ropecli ruler`: finds the effective context length with RULER's tasks."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_doc import Doc
from annotated_types import Ge, Interval, MinLen
from typing_extensions import Unpack

from ropecli.commands import options
from ropecli.commands.messages import warn
from ropecli.commands.options import DATA
from ropecli.commands.outputs import refuse_outputs
from ropecli.commands.signature import Flag, command
from ropecli.errors import MethodError

if TYPE_CHECKING:
    from ropecli.commands.ruler_run import RulerRun
    from ropecli.commands.subject import Subject
    from ropecli.evaluation.eval_report import RulerReport


@dataclass(frozen=True)
class RulerComparison:
    """reports: one per checkpoint. plot: the drawn file."""

    reports: "list[RulerReport]"
    plot: Path | None = None

    def as_json(self) -> list[dict[str, Any]]:
        return [report.as_json() for report in self.reports]


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
        "niah_single_1 to _3, niah_multikey_1 to _3, niah_multivalue, niah_multiquery, vt, cwe, fwe, qa_1, qa_2. "
        "Default: all whose prompts fit; qa_1 and qa_2 only with their files."
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
Essay = Annotated[
    str,
    Flag("--data", "-d"),
    Doc("Text of the essay: a file or folder, a Hub dataset id, or 'demo'. RULER takes Paul Graham's essays."),
    DATA,
]
Squad = Annotated[str | Path | None, Flag("--squad", metavar="FILE"), Doc("Questions of qa_1: SQuAD's JSON."), DATA]
HotpotQA = Annotated[
    str | Path | None, Flag("--hotpotqa", metavar="FILE"), Doc("Questions of qa_2: HotpotQA's JSON."), DATA
]


class RulerOptions(options.EvalTextOptions, options.InMemoryOptions, options.MeasuringOptions, total=False): ...


@command
def ruler(
    checkpoints: options.Checkpoints,
    *,
    lengths: PromptLengths = None,
    tasks: Tasks = None,
    samples: Annotated[int, Ge(1), Doc("Prompts per task and length. RULER's tables have 500.")] = 50,
    mode: Mode = "generate",
    chat_template: options.ChatTemplate = "auto",
    threshold: Threshold = None,
    data: Essay = "demo",
    squad: Squad = None,
    hotpotqa: HotpotQA = None,
    seed: Annotated[int, Ge(0), Doc("Random seed of the prompts.")] = 0,
    batch_size: Annotated[int, Ge(1), Doc("generate: prompts at once."), options.LOADING] = 1,
    plot: options.PlotFile = None,
    resume: options.Resume = False,
    **shared: Unpack[RulerOptions],
) -> RulerComparison:
    """Find the effective context length: RULER's tasks at several lengths.

    The effective length is the longest one up to which the mean score stays at or above --threshold.

    Several processes, started by `accelerate launch -m ropecli ruler ...`, share the prompts.
    """
    from ropecli.commands.measuring import interruptible
    from ropecli.commands.ruler_run import choose_ruler, prepare_ruler
    from ropecli.commands.subject import load, open_subject, refuse_attention
    from ropecli.evaluation.eval_report import write_report
    from ropecli.evaluation.processes import join_workers
    from ropecli.evaluation.ruler.measure import RulerScores
    from ropecli.reporting.figures.style import refuse_unknown_ending
    from ropecli.reporting.plot_kinds import draw_reports
    from ropecli.resume import open_state, refuse_interrupted, remove_state

    report_file, picture = options.optional_path(shared["output"]), options.optional_path(plot)
    refuse_unknown_ending(picture)
    refuse_outputs(report_file, picture)
    refuse_interrupted(report_file, resume)
    files = {"qa_1": options.optional_path(squad), "qa_2": options.optional_path(hotpotqa)}
    asked = choose_ruler(
        options.with_config(data, shared["dataset_config"]),
        lengths,
        tasks,
        questions={name: file for name, file in files.items() if file},
        samples=samples,
        mode=mode,
        chat_template=chat_template,
        threshold=threshold,
        seed=seed,
        chunk=shared["chunk"],
        batch_size=batch_size,
        text_column=shared["text_column"],
        split=shared["split"],
        loading=options.loading_of(shared),
    )
    names = list(dict.fromkeys(options.listed(checkpoints)))
    if shared["revision"] and len(names) > 1:
        raise MethodError("--revision works with one checkpoint only.")
    subjects = [open_subject(name, shared) for name in names]
    for subject in subjects:
        refuse_attention(subject.checkpoint, subject.plan, shared["attn"])
        for warning in subject.warnings:
            warn(warning)
    runs = [prepare_ruler(subject.checkpoint, subject.reach, asked) for subject in subjects]
    workers = join_workers()
    request = _request(subjects, runs)
    state = open_state(report_file, request, workers.rank) if report_file else nullcontext()
    reports = []
    with interruptible(report_file), state as folder:
        scores = RulerScores(folder, workers.rank)
        for index, (subject, run) in enumerate(zip(subjects, runs, strict=True)):  # one model in memory at a time
            model = load(subject.checkpoint, run.maker.tokenizer.tokenizer, **asked.loading)
            switching = subject.patch(model)
            reports.append(run.measure(subject, model, scores, f"{index}", workers, switching=switching))
    if workers.first:
        if picture:
            draw_reports(reports, picture)
        if report_file:
            write_report(report_file, [report.as_json() for report in reports])
        remove_state(report_file)
    return RulerComparison(reports, picture)


def _request(subjects: "Sequence[Subject]", runs: "Sequence[RulerRun]") -> dict[str, Any]:
    """Everything that the scores depend on."""
    from ropecli.commands.subject import fingerprint

    return {
        "checkpoints": [subject.checkpoint.digest() for subject in subjects],
        "scalings": [fingerprint(subject.plan) for subject in subjects],
        "runs": [run.request() for run in runs],
    }
