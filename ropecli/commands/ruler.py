"""`ropecli ruler`: finds the effective context length with RULER's tasks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_doc import Doc
from annotated_types import Ge, Interval

from ropecli.commands import options
from ropecli.commands.messages import progress_bar, warn
from ropecli.commands.options import DATA, Flag
from ropecli.commands.outputs import refuse_outputs
from ropecli.errors import DataError, MethodError

if TYPE_CHECKING:
    from ropecli.commands.subject import Subject
    from ropecli.evaluation.eval_report import RulerReport
    from ropecli.evaluation.processes import Workers
    from ropecli.evaluation.ruler.definitions import RulerTask
    from ropecli.evaluation.ruler.measure import RulerScores
    from ropecli.evaluation.ruler.prompts import PromptMaker

_LONGEST = 2**24


@dataclass(frozen=True)
class RulerComparison:
    """reports: one per checkpoint. plot: the drawn file."""

    reports: "list[RulerReport]"
    plot: Path | None = None

    def as_json(self) -> list[dict[str, Any]]:
        return [report.as_json() for report in self.reports]


@dataclass(frozen=True)
class _Asked:
    """The options of a run. tasks: None for all that fit. questions: file by task."""

    data: str
    lengths: list[int] | None
    tasks: Sequence[str] | None
    questions: dict[str, Path]
    samples: int
    mode: str
    chat_template: str
    threshold: float | None
    seed: int
    chunk: int | None
    batch_size: int
    text_column: str
    split: str | None
    loading: dict[str, Any]


@dataclass(frozen=True)
class _Run:
    """One checkpoint with its prompts."""

    subject: "Subject"
    maker: "PromptMaker"
    tasks: "list[RulerTask]"
    lengths: list[int]
    chat: bool


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
    from ropecli.commands.subject import open_subject, refuse_attention
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
    asked = _Asked(
        options.with_config(data, dataset_config),
        None if lengths is None else options.sorted_numbers(lengths, "--lengths"),
        None if tasks is None else options.listed(tasks),
        {name: file for name, file in files.items() if file},
        samples,
        mode,
        chat_template,
        threshold,
        seed,
        chunk,
        batch_size,
        text_column,
        split,
        options.loading_of(dtype, device, attn, device_map, max_memory, load_in_8bit, load_in_4bit),
    )
    _check(asked)
    names = list(dict.fromkeys(options.listed(checkpoints)))
    if revision and len(names) > 1:
        raise MethodError("--revision works with one checkpoint only.")
    subjects = [open_subject(name, revision, method, factor, settings, factors_file, original_length) for name in names]
    for subject in subjects:
        refuse_attention(subject.checkpoint, subject.plan, attn)
        for warning in subject.warnings:
            warn(warning)
    runs = [_prepare(subject, asked) for subject in subjects]
    workers = join_workers()
    reports = []
    with interruptible(report_file):
        if report_file:
            with open_state(report_file, _request(runs, asked), workers.rank) as folder:
                scores = RulerScores(folder, workers.rank)
                reports = [_measure(run, asked, scores, f"{index}", workers) for index, run in enumerate(runs)]
        else:
            reports = [_measure(run, asked, RulerScores(), "", workers) for run in runs]
    if workers.first:
        if picture:
            draw_reports(reports, picture)
        if report_file:
            write_report(report_file, [report.as_json() for report in reports])
        remove_state(report_file)
    return RulerComparison(reports, picture)


def _check(asked: _Asked) -> None:
    """Raise MethodError for options that do not fit."""
    from ropecli.evaluation.retrieval.accuracy import check_mode
    from ropecli.evaluation.ruler.definitions import choose_tasks

    check_mode(asked.mode)
    if asked.lengths and asked.lengths[-1] > _LONGEST:
        raise MethodError(f"--lengths has {asked.lengths[-1]}; expected at most {_LONGEST} tokens.")
    choose_tasks(asked.tasks, asked.mode, list(asked.questions))


def _prepare(subject: "Subject", asked: _Asked) -> _Run:
    """Make a checkpoint's prompts, before its weights are loaded."""
    from ropecli.commands.measuring import default_lengths
    from ropecli.data.sources import read_texts
    from ropecli.evaluation.chat_frame import find_frame
    from ropecli.evaluation.retrieval.haystack import PieceTokenizer
    from ropecli.evaluation.ruler.definitions import Needles, Questions, choose_tasks
    from ropecli.evaluation.ruler.haystacks import Pieces, read_essay, read_questions
    from ropecli.evaluation.ruler.measure import fitting_tasks
    from ropecli.evaluation.ruler.prompts import PromptMaker
    from ropecli.live.loading import load_tokenizer

    tokenizer = load_tokenizer(subject.checkpoint)
    pieces = PieceTokenizer(tokenizer)
    frame = find_frame(tokenizer, asked.chat_template)
    tasks = choose_tasks(asked.tasks, asked.mode, list(asked.questions))
    lengths = asked.lengths or default_lengths(*subject.reach)
    essay = None
    if any(isinstance(task, Needles) and task.haystack == "essay" for task in tasks):
        with progress_bar("reading the essay", None):
            texts = read_texts(asked.data, text_column=asked.text_column, split=asked.split)
            essay = read_essay(texts, Pieces(pieces), lengths[-1])
    questions = {
        task.name: read_questions(asked.questions[task.name], task.source)
        for task in tasks
        if isinstance(task, Questions)
    }
    maker = PromptMaker(pieces, frame, essay, questions, asked.seed)
    if asked.lengths is None:
        lengths = [length for length in lengths if _fits(maker, tasks, length)] or lengths[-1:]
    fitting = fitting_tasks(maker, tasks, lengths, required=asked.tasks is not None)
    if missing := [task.name for task in tasks if task not in fitting]:
        warn(f"Not measured, since {lengths[0]} tokens are too short for them: {', '.join(missing)}.")
    return _Run(subject, maker, fitting, lengths, frame is not None)


def _fits(maker: "PromptMaker", tasks: "list[RulerTask]", length: int) -> bool:
    """Return whether any task fits this length."""
    from ropecli.evaluation.ruler.measure import fitting_tasks

    try:
        return bool(fitting_tasks(maker, tasks, [length], required=False))
    except DataError:
        return False


def _request(runs: list[_Run], asked: _Asked) -> dict[str, Any]:
    """Everything that the scores depend on."""
    from ropecli.commands.subject import fingerprint, weight_settings
    from ropecli.evaluation.eval_report import environment
    from ropecli.live.loading import settle

    dtype, device = settle(asked.loading["dtype"], asked.loading["device"])
    return {
        "checkpoints": [run.subject.checkpoint.digest() for run in runs],
        "scalings": [fingerprint(run.subject.plan) for run in runs],
        "prompts": [_fingerprint(run) for run in runs],
        "tasks": [[task.name for task in run.tasks] for run in runs],
        "lengths": [run.lengths for run in runs],
        "samples": asked.samples,
        "mode": asked.mode,
        "seed": asked.seed,
        "dtype": dtype,
        "device": device.partition(":")[0],
        "attn": asked.loading["attn"],
        **weight_settings(asked.loading),
        "versions": environment(),
    }


def _fingerprint(run: _Run) -> str:
    """Hash of the first prompt of each task at the longest length."""
    import hashlib

    sha = hashlib.sha256()
    for task in run.tasks:
        sha.update(run.maker.make(task, run.lengths[-1], 0).ids.astype("<i8").tobytes())
    return sha.hexdigest()


def _measure(run: _Run, asked: _Asked, scores: "RulerScores", part: str, workers: "Workers") -> "RulerReport":
    """Load a checkpoint and ask it; one model is in memory at a time."""
    from ropecli.commands.measuring import chunk_size
    from ropecli.commands.subject import base_report, load, weight_settings
    from ropecli.evaluation.eval_report import RulerReport
    from ropecli.evaluation.ruler.answers import PUBLISHED, effective_length
    from ropecli.evaluation.ruler.measure import measure_ruler

    model = load(run.subject.checkpoint, run.maker.tokenizer.tokenizer, **asked.loading)
    chunk = chunk_size(asked.chunk, run.lengths[-1])
    total = len(run.tasks) * len(run.lengths) * len(workers.share(range(asked.samples)))
    with progress_bar("asking", total) as step:
        result = measure_ruler(
            model,
            run.maker,
            run.tasks,
            run.lengths,
            samples=asked.samples,
            mode=asked.mode,
            batch_size=asked.batch_size,
            switching=run.subject.patch(model),
            chunk=chunk,
            scores=scores,
            part=part,
            workers=workers,
            advance=step,
            say=warn,
        )
    by_length: dict[int, list[float]] = {length: [] for length in run.lengths}
    for cell in result.cells:
        by_length[cell.length].append(cell.score)
    means = {length: sum(found) / len(found) for length, found in by_length.items()}
    threshold = PUBLISHED * means[run.lengths[0]] if asked.threshold is None else asked.threshold
    return RulerReport(
        **base_report(run.subject, asked.data, model),
        mode=asked.mode,
        settings={
            "samples": asked.samples,
            "seed": asked.seed,
            "chat_template": run.chat,
            "squad": str(asked.questions.get("qa_1") or "") or None,
            "hotpotqa": str(asked.questions.get("qa_2") or "") or None,
            "text_column": asked.text_column,
            "split": asked.split,
            "chunk": chunk,
            "batch_size": asked.batch_size,
            "attn": asked.loading["attn"],
            "prompts_read_once": result.once,
            "processes": workers.count,
            **weight_settings(asked.loading),
        },
        fingerprint=result.fingerprint,
        threshold=threshold,
        relative=asked.threshold is None,
        effective_length=effective_length(means, threshold) if max(means.values()) > 0 else None,
        cells=result.cells,
    )
