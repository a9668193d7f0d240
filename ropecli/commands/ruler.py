"""`ropecli ruler`: finds the effective context length with RULER's tasks."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_doc import Doc
from annotated_types import Ge, Interval

from ropecli.commands import options
from ropecli.commands.messages import warn
from ropecli.commands.options import DATA, Flag
from ropecli.commands.outputs import refuse_outputs
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


def ruler(
    checkpoints: Annotated[
        Sequence[str],
        Flag("checkpoints", metavar="CHECKPOINT..."),
        Doc("Folders, Hub ids (owner/name), or 'demo'."),
    ],
    *,
    lengths: Annotated[
        Sequence[int] | None,
        Flag("--lengths", "-l", metavar="TOKENS,..."),
        Doc(
            "Exact lengths of the prompt with the tokens that may be generated, such as 4k,8k,16k. Default: doubling "
            "from a quarter of the pretraining length to the context length."
        ),
    ] = None,
    tasks: Annotated[
        Sequence[str] | None,
        Flag("--tasks", "-t", metavar="TASK,..."),
        Doc(
            "niah_single_1 to _3, niah_multikey_1 to _3, niah_multivalue, niah_multiquery, vt, cwe, fwe, qa_1, qa_2. "
            "Default: all whose prompts fit; qa_1 and qa_2 only with their files."
        ),
    ] = None,
    samples: Annotated[int, Ge(1), Doc("Prompts per task and length. RULER's tables have 500.")] = 50,
    mode: Annotated[
        str,
        Doc(
            "generate: greedy answers, scored as published. rank: the right answers must have the highest "
            "log-probabilities among wrong ones; works for base models."
        ),
    ] = "generate",
    chat_template: options.ChatTemplate = "auto",
    threshold: Annotated[
        float | None,
        Interval(gt=0, le=1),
        Doc(
            "Mean score that the effective length requires, 0 to 1. Default: 85.6% of the score at the shortest length."
        ),
    ] = None,
    data: Annotated[
        str,
        Flag("--data", "-d"),
        Doc("Text of the essay: a file or folder, a Hub dataset id, or 'demo'. RULER takes Paul Graham's essays."),
        DATA,
    ] = "demo",
    squad: Annotated[
        str | Path | None, Flag("--squad", metavar="FILE"), Doc("Questions of qa_1: SQuAD's JSON."), DATA
    ] = (None),
    hotpotqa: Annotated[
        str | Path | None, Flag("--hotpotqa", metavar="FILE"), Doc("Questions of qa_2: HotpotQA's JSON."), DATA
    ] = None,
    text_column: options.TextColumn = "text",
    split: options.Split = None,
    dataset_config: options.DatasetConfig = None,
    seed: Annotated[int, Ge(0), Doc("Random seed of the prompts.")] = 0,
    method: options.InMemory = None,
    factor: options.Factor = None,
    settings: options.Settings = None,
    factors_file: options.FactorsFile = None,
    original_length: options.OriginalLength = None,
    chunk: options.Chunk = None,
    batch_size: Annotated[int, Ge(1), Doc("generate: prompts at once."), options.LOADING] = 1,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
    max_memory: options.MaxMemory = None,
    load_in_8bit: options.LoadIn8bit = False,
    load_in_4bit: options.LoadIn4bit = False,
    attn: options.Attn = "auto",
    output: options.ReportFile = None,
    plot: options.PlotFile = None,
    resume: options.Resume = False,
    revision: options.Revision = None,
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

    report_file, picture = options.optional_path(output), options.optional_path(plot)
    refuse_unknown_ending(picture)
    refuse_outputs(report_file, picture)
    refuse_interrupted(report_file, resume)
    files = {"qa_1": options.optional_path(squad), "qa_2": options.optional_path(hotpotqa)}
    asked = choose_ruler(
        options.with_config(data, dataset_config),
        lengths,
        tasks,
        questions={name: file for name, file in files.items() if file},
        samples=samples,
        mode=mode,
        chat_template=chat_template,
        threshold=threshold,
        seed=seed,
        chunk=chunk,
        batch_size=batch_size,
        text_column=text_column,
        split=split,
        loading=options.loading_of(dtype, device, attn, device_map, max_memory, load_in_8bit, load_in_4bit),
    )
    names = list(dict.fromkeys(options.listed(checkpoints)))
    if revision and len(names) > 1:
        raise MethodError("--revision works with one checkpoint only.")
    subjects = [open_subject(name, revision, method, factor, settings, factors_file, original_length) for name in names]
    for subject in subjects:
        refuse_attention(subject.checkpoint, subject.plan, attn)
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
