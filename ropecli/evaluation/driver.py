"""Measure tasks on checkpoints: one driver, one store and one way to resume for all of them.

A task has samples. A reader reads them, the task scores what was read, and each score is saved at once. The task then
makes the cells of a report from all scores.
"""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ropecli.data.documents import Documents
from ropecli.errors import DataError, EndpointError
from ropecli.evaluation.kinds import KINDS
from ropecli.evaluation.processes import ALONE, Workers, among_processes
from ropecli.evaluation.progress import Progress
from ropecli.evaluation.readers.reader import Reader, batches
from ropecli.evaluation.report import Cell, Reference, Report
from ropecli.evaluation.subject import ReaderFactory, Subject
from ropecli.messages import command_line, warn
from ropecli.resume import append_record, open_state, read_records, remove_state, state_folder
from ropecli.signals import terminated_by_signals

SampleId = tuple[Any, ...]
"""Strings and numbers. In a batch they differ in the last place alone, or after the first: Reader.mixes_lengths."""
Values = dict[SampleId, Any]
"""The JSON value that a task keeps of each sample."""
_READER: SampleId = ("reader",)
_RUN = "run"
"""The part of the values that belong to no task."""
_IDENTITY: SampleId = ("identity",)


class Task:
    """A measurement: its samples, and how they are scored.

    name: of the task in the report, a key of KINDS. source: the data. documents: of a loss, for the report.
    answers: whether the reader continues prompts. settings: for the report. lengths: tokens, ascending. one_tokenizer:
    whether all subjects must have the same tokens.
    """

    name: str
    source: str
    documents: Documents | None = None
    answers = True
    lengths: list[int]
    one_tokenizer = False

    def up_to(self, length: int) -> "Task":
        """The task for a subject that reads no more than `length` tokens."""
        return self

    @property
    def needs_losses(self) -> bool:
        """True if it scores given tokens, False if the reader's own answers."""
        return True

    @property
    def settings(self) -> dict[str, Any]:
        raise NotImplementedError

    def request(self) -> dict[str, Any]:
        """Everything that the values depend on, next to the subject and the reader."""
        raise NotImplementedError

    def longest(self) -> tuple[np.ndarray, int, int]:
        """The ids of the longest sample, its length with an answer, and the largest id of all samples that is known."""
        raise NotImplementedError

    def samples(self, *, one_pass: bool) -> list[SampleId]:
        """one_pass: whether one pass may serve several lengths."""
        raise NotImplementedError

    def tokens(self, sample: SampleId) -> int:
        """Tokens that the reader reads for a sample, to show progress."""
        raise NotImplementedError

    def pass_length(self, sample: SampleId) -> int:
        """Tokens of the longest pass of a sample, to estimate its time."""
        return self.tokens(sample)

    def work(self, samples: Iterable[SampleId] | None = None) -> Counter[int]:
        """Tokens to read by the length of the pass. samples: None for all."""
        work = Counter[int]()
        for sample in self.samples(one_pass=True) if samples is None else samples:
            work[self.pass_length(sample)] += self.tokens(sample)
        return work

    def score(self, reader: Reader, batch: Sequence[SampleId]) -> list[Any]:
        """One value per sample of a batch. Raises RopecliError if the model overflows or memory runs out."""
        raise NotImplementedError

    def cells(self, values: Values) -> list[Cell]:
        """Raises NotFiniteError."""
        raise NotImplementedError

    def fingerprint(self, values: Values) -> str:
        """sha256 of the token ids of all samples."""
        raise NotImplementedError

    def identities(self) -> list[str]:
        """A digest of each document that the cells have, in order; the same in runs on more or fewer documents."""
        return []


class Store:
    """Values by part and sample. A part is one job.

    folder: where they are saved, a file per process; None: only in memory.
    """

    def __init__(self, folder: Path | None = None, rank: int = 0) -> None:
        self._values: dict[str, Values] = {}
        self._unsaved: list[list[Any]] = []
        self.folder = folder
        self._file = folder / f"samples-{rank}.jsonl" if folder else None
        for path in sorted(folder.glob("samples-*.jsonl")) if folder else []:
            for part, sample, value in read_records(path):
                self._values.setdefault(part, {})[tuple(sample)] = value

    def values(self, part: str) -> Values:
        return self._values.setdefault(part, {})

    def unread(self, task: Task, part: str) -> Counter[int]:
        """The work of the samples without a value."""
        return task.work(sample for sample in task.samples(one_pass=True) if sample not in self.values(part))

    def add(self, part: str, sample: SampleId, value: Any, *, later: bool = False) -> None:
        """Add and save a value, unless it has numbers that are not finite. Raises OSError.

        later: save it together with the next one, since a saved state must have a result.
        """
        self.values(part)[sample] = value
        if self._file:
            self._unsaved.append([part, sample, value])
        while self._file and self._unsaved and not later:
            with contextlib.suppress(ValueError):
                append_record(self._file, self._unsaved.pop(0))


@dataclass(frozen=True)
class Job:
    """The task to measure on one subject."""

    subject: Subject
    task: Task
    tokenizer: Any


def score_samples(
    task: Task,
    reader: Reader,
    store: Store | None = None,
    part: str = "",
    workers: Workers = ALONE,
    progress: Progress | None = None,
    bar: str = "",
) -> Values:
    """Score all samples that the store does not have. Returns the values of all processes in the order of samples.

    Batches are cut from all samples, so that a resumed run reads the same ones: a batch that was half finished is read
    again. part: names them in the store. progress: of the command. bar: description.
    """
    store = store or Store()
    longest, length, largest = task.longest()
    reader.prepare(longest, length, largest, answers=task.answers, losses=task.needs_losses)
    if task.needs_losses and not reader.gives_losses:
        raise EndpointError(
            f"The server gives no log-probabilities of a prompt's tokens, which {task.name} needs. Serve with vLLM, or "
            "measure what it generates: needle and ruler with --mode generate, recall with --generate."
        )
    if store.folder:
        _refuse_another_model(reader, store, longest)
    samples, done = task.samples(one_pass=not reader.follows_length), store.values(part)
    share = samples[workers.rank :: workers.count]
    equal = slice(1 if reader.mixes_lengths else -1)
    cut = batches(share, lambda sample: sample[equal], reader.batch_size)
    unread = [batch for batch in cut if not done.keys() >= {*batch}]
    work = task.work(chain(*unread)) if progress else {}
    with progress.job(bar, reader, work) if progress else contextlib.nullcontext():
        for batch in unread:
            if progress:
                for length, tokens in sorted(task.work(batch).items()):
                    progress.begin(length, tokens)
            for sample, value in zip(batch, task.score(reader, batch), strict=True):
                store.add(part, sample, value)
    dtype, device = reader.dtype_and_device()
    read = {"dtype": dtype, "device": device, "chunk": reader.chunk, "follows_length": reader.follows_length}
    store.add(part, _READER, read)
    values = workers.gather({sample: done[sample] for sample in share})
    return {sample: values[sample] for sample in samples}


def _refuse_another_model(reader: Reader, store: Store, ids: np.ndarray) -> None:
    """Remember which model answers, or refuse another than the one that the run began with. ids: to ask it with."""
    then, now = store.values(_RUN).get(_IDENTITY), reader.identity(ids)
    if then is None and now is not None:
        store.add(_RUN, _IDENTITY, now, later=True)
    elif then is not None and (difference := reader.difference(then, now)):
        raise EndpointError(
            f"{difference} Serve what the run began with, and resume it; or delete {store.folder} and measure again."
        )


def make_reports(
    jobs: Sequence[Job], factory: ReaderFactory, output: Path | None = None, workers: Workers = ALONE
) -> list[Report]:
    """The reports of all jobs, with one model in memory at a time. Those of recall refer to the first one.

    output: where the result will be written; progress is saved next to it, and an earlier run of the same request is
    resumed. Raises RecipeError for a different request, OutputError if another run uses it or it cannot be written; and
    the errors of measure_job.
    """
    factory.check([job.subject for job in jobs])
    state: contextlib.AbstractContextManager[Path | None] = contextlib.nullcontext()
    if output:
        tasks = {id(job.task): job.task for job in jobs}
        requests = {key: task.request() for key, task in tasks.items()}  # once: scalings share tasks, prompts are made
        measured = [{**job.subject.identity._asdict(), "task": requests[id(job.task)]} for job in jobs]
        state = open_state(output, {"jobs": measured, **factory.request()}, workers.rank)
    reports: list[Report] = []
    reference: Reference | None = None
    with interruptible(output), state as folder:
        store = Store(folder, workers.rank)
        unread = [store.unread(job.task, str(number)) for number, job in enumerate(jobs)]
        advice = " An interrupted run continues with --resume." if output else " To resume it, set --output."
        shares = [{length: tokens / workers.count for length, tokens in work.items()} for work in unread]
        progress = Progress(shares, advice)
        with progress.shown():
            for number, job in enumerate(jobs):
                bar = job.subject.name + f" ({number + 1} of {len(jobs)})" * (len(jobs) > 1)
                scalings = [peer.subject for peer in jobs if peer.subject.checkpoint is job.subject.checkpoint]
                report = measure_job(job, factory, store, str(number), progress, bar, workers, scalings)
                try:
                    reference = reference or report.as_reference()
                except DataError:
                    remove_state(output)  # the same command would end so again
                    raise
                reports.append(replace(report, reference=reference))
    return reports


def measure_job(
    job: Job,
    factory: ReaderFactory,
    store: Store,
    part: str,
    progress: Progress,
    bar: str,
    workers: Workers = ALONE,
    scalings: Sequence[Subject] = (),
) -> Report:
    """The report of a job, the next that `progress` expects; of recall, without a reference.

    If an earlier run has saved all values, no model is loaded. scalings: see ReaderFactory.open. Other arguments: see
    score_samples. Raises NotFiniteError, DataError, and the errors of score_samples.
    """
    task, subject, done = job.task, job.subject, store.values(part)
    samples = task.samples(one_pass=not done[_READER]["follows_length"]) if _READER in done else []
    has_all = bool(samples) and all(sample in done for sample in samples)
    if all(workers.gather({workers.rank: has_all}).values()):  # another process may have seen the files earlier
        progress.skip()
        values = {sample: done[sample] for sample in samples}
    else:
        with factory.open(subject, job.tokenizer, scalings) as reader:
            values = score_samples(task, reader, store, part, workers, progress, bar)
    read, documents = done[_READER], task.documents or Documents((), 0)
    return KINDS[task.name](
        task=task.name,
        checkpoint=subject.checkpoint.name,
        **subject.identity._asdict(),
        method=subject.spec.method.name,
        factor=subject.spec.factor,
        params=dict(subject.spec.params),
        in_memory=subject.plan is not None,
        original_max_position_embeddings=subject.positions.pretraining_length,
        context_length=subject.positions.context_length,
        source=task.source,
        dtype=read["dtype"],
        device=read["device"],
        command=list(command_line.get()),
        settings={**task.settings, "chunk": read["chunk"], **factory.settings, "processes": workers.count},
        fingerprint=task.fingerprint(values),
        cells=task.cells(values),
        too_short=documents.too_short,
        document_names=documents.names,
        documents=task.identities(),
    )


@contextlib.contextmanager
def interruptible(output: Path | None) -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a run as Ctrl-C does, and print how to resume it.

    output: the run saves its progress next to it; None if it saves none. Raises RopecliError if another process of the
    run ended.
    """
    again = f"Progress is saved next to {output}. Run the same command with --resume to continue."
    try:
        with terminated_by_signals(), among_processes(again if output else "Start all processes again."):
            yield
    except (KeyboardInterrupt, SystemExit) as stop:
        if not (output and state_folder(output).exists()):
            raise
        if isinstance(stop, KeyboardInterrupt):
            raise KeyboardInterrupt(f"Interrupted. {again}") from None  # the command line prints it
        warn(f"Stopped. {again}")
        raise
