"""Chooses the extension of a checkpoint to a length: candidates, measured on more and more documents.

A candidate is a method with a factor, or the checkpoint as it is. Factors are 1, 1.5 and 2 times what the length needs:
methods that spread positions over the whole length use far text better with headroom. Two losses decide, on the user's
text: of a passage whose first occurrence is far back (`recall`), and of text within the pretraining length. After each
round, on more documents, candidates go that certainly cost more at short context than the user allows, or, from
eight documents on, are certainly worse than the best within the cost, by paired 95% intervals; of the others the better
half stays (successive halving: Jamieson and Talwalkar 2016, arXiv:1502.07943). Without a limit of the cost, the best is
chosen, or of those that are not certainly worse, the cheapest.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import ceil
from operator import attrgetter
from typing import Any

import numpy as np

from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.patch_plan import make_plan
from ropecli.checkpoint.state import read_state
from ropecli.engines.engine_export import export_checkpoint
from ropecli.errors import MethodError, NotFiniteError, RopecliError
from ropecli.evaluation.driver import Job, Store, Task, measure_job
from ropecli.evaluation.lengths import Lengths
from ropecli.evaluation.progress import Progress, Speed, Work
from ropecli.evaluation.protocols import Protocol, Window
from ropecli.evaluation.report import Cell, Change, Report, loss_change
from ropecli.evaluation.subject import LiveReaderFactory, Subject
from ropecli.evaluation.tasks.perplexity import Perplexity
from ropecli.evaluation.tasks.recall import Recall
from ropecli.evaluation.texts import common_lengths, read_texts
from ropecli.evaluation.verdict import ENOUGH, are_few, certain_sign, decide, level
from ropecli.live.loading import load_tokenizer
from ropecli.messages import duration, progress_bar, say, warn
from ropecli.scaling.registry import find_method, scaling_methods
from ropecli.scaling.spec import make_spec
from ropecli.training.validation import Scored

_LOSS = attrgetter("far.value")
HEADROOM = (1.0, 1.5, 2.0)
OWN_ATTENTION = "ropecli"
_FIRST_ROUND = 4
"""Documents."""
_LEAST_CANDIDATES = 3
"""Candidates to keep before fewer documents are read, for a budget."""
_SHARES_TO_TIME = (16, 8, 4)
"""Parts of the length, to estimate the time from."""
_PLAN, _PLAN_KEY = "budget", ("documents and candidates",)


def make_candidates(
    checkpoint: Checkpoint,
    length: int,
    engine: str,
    methods: Sequence[str] | None = None,
    factors: Sequence[float] = (),
) -> list[Subject]:
    """The methods that need no training and that the engine computes, with their factors.

    First the checkpoint as it is, if it reads the length; then the makers' own scaling; then yarn, the most headroom
    first. engine: of --serve. methods, factors: instead of all. Raises MethodError with the first reason if there are
    none.
    """
    state = read_state(checkpoint)
    positions = state.positions
    needed = length / positions.pretraining_length
    if needed < 1:
        raise MethodError(
            f"--length is {length}, and {checkpoint.name} is pretrained on {positions.pretraining_length} tokens: "
            "there is nothing to extend. Choose a greater --length."
        )
    subjects = [Subject(checkpoint)] if positions.context_length >= length and methods is None else []
    specs: list[tuple[str, float]] = []
    if (makers := state.before.makers) and makers.extension and makers.extension[1] >= needed and methods is None:
        specs.append(makers.extension[:2])
    untrained = [
        method.name
        for method in map(find_method, scaling_methods())
        if method.uses_factor and method.training in ("no", "a little") and not method.depends_on_length
    ]
    for name in methods or sorted(untrained, key=lambda name: name != "yarn"):
        remaps = find_method(name).remaps
        if engine == OWN_ATTENTION or not remaps:
            shares = HEADROOM[:1] if remaps else HEADROOM
            specs += [(name, factor) for factor in factors or [needed * share for share in reversed(shares)]]
    refusals: list[str] = []
    for name, factor in dict.fromkeys(specs) if needed > 1 or methods else ():
        try:
            plan = make_plan(checkpoint, make_spec(name, factor), target_length=length, choose_factor=False)
            by_engine = engine not in ("transformers", OWN_ATTENTION)
            if by_engine and (cannot := export_checkpoint(replace(checkpoint, config=plan.config), engine).cannot):
                raise MethodError(" ".join(cannot))
        except RopecliError as error:
            refusals.append(str(error))
            continue
        if (candidate := Subject(checkpoint, plan)).identity not in [subject.identity for subject in subjects]:
            subjects.append(candidate)
    if not subjects:
        why = refusals[0] if refusals else f"{engine} runs none of the methods."
        raise MethodError(f"Nothing that {engine} runs extends {checkpoint.name} to {length} tokens: {why}")
    return subjects


def label_of(subject: Subject) -> str:
    return "as it is" if subject.label == "none" else subject.label


@dataclass(frozen=True, eq=False)
class Measured:
    """A candidate after its last round. far: loss with the far passage. cost: at short context, against the base."""

    subject: Subject
    far: Cell
    cost: Change
    recall: Change

    @property
    def label(self) -> str:
        return label_of(self.subject)

    def is_certainly_worse(self, best: "Measured") -> bool:
        return certain_sign(loss_change(self.far, best.far), self.far.samples) == 1

    @property
    def gains(self) -> bool:
        """Whether it certainly reads better than the base without the far text."""
        return self.recall.low is not None and self.recall.low > 0

    def costs_more(self, most: float, *, certainly: bool = False) -> bool:
        cost = self.cost.low if certainly and self.cost.low is not None else self.cost.change
        return cost > most


@dataclass(frozen=True)
class Choice:
    """chosen: None if no candidate reads far within the cost. measured: those of the last round first, best first.
    reports: the base, the chosen candidate, or else the best, and what was trained of it; recall, then perplexity, then
    that of long texts. trained: on all documents.
    """

    chosen: Measured | None
    measured: Sequence[Measured]
    reports: Sequence[Report]
    trained: Measured | None = None


def halved(measured: Sequence[Measured], keep: int, most_cost: float) -> list[Measured]:
    """Candidates within the cost, then those not certainly beyond it, by far loss; last the best at any cost.

    Candidates that are certainly worse than the best within the cost are dropped. keep: number, without the last one.
    """
    by_loss = sorted(measured, key=_LOSS)
    within = [candidate for candidate in by_loss if not candidate.costs_more(most_cost)]
    unsure = [candidate for candidate in by_loss if not candidate.costs_more(most_cost, certainly=True)]
    allowed = [*dict.fromkeys([*within, *unsure])]
    kept = level(allowed, Measured.is_certainly_worse) if within else allowed
    return [*dict.fromkeys([*kept[:keep], by_loss[0]])]


class Extension:
    """A search: recall decides, and `prefix` within the pretraining length gives the cost.

    `tail` is for the base and the chosen candidate, on the documents that have the length.

    candidates: see make_candidates. texts: DocumentOptions. most_cost: allowed relative change of perplexity, or
    infinity. Raises DataError for texts that cannot be used.
    """

    def __init__(
        self,
        opened: Checkpoint,
        candidates: Sequence[Subject],
        length: int,
        texts: Any,
        loading: dict[str, Any],
        most_cost: float,
    ) -> None:
        self.candidates, self._most_cost = list(candidates), most_cost
        self.base = Subject(opened) if candidates[0].plan else candidates[0]
        if self.base.label != "none":
            self.base = Subject(opened, make_plan(opened, make_spec("unscaled"), in_memory=True))
        self._tokenizer, self._factory = load_tokenizer(opened), LiveReaderFactory(loading)
        self._store, self._progress = Store(), Progress([], " An interrupted run continues with --resume.")
        self._trained: Subject | None = None
        short, source = self.base.positions.pretraining_length, texts["data"]
        to_read = Lengths((min(short, length), length))
        documents, lengths = read_texts(texts, self._tokenizer, to_read, Protocol("recall"))
        if are_few(len(documents.kept)):
            warn(f"{len(documents.kept)} documents are few: the best one is chosen, though others may be level.")
        self._recall = Recall(documents, lengths, short, source)
        self._of_base = self._recall.up_to(self.base.positions.context_length)
        most = short if self._recall.passages == 1 else short // 2  # else it takes as long as recall
        halves = [most >> halved for halved in reversed(range(most.bit_length()))]
        self.short_length = common_lengths(documents, halves)[-1]
        if self.short_length < most:
            say(f"The cost is measured at {self.short_length} tokens: too few documents have {2 * self.short_length}.")
        self._short = Perplexity(documents.first(self.short_length), [self.short_length], "prefix", source)
        self._text: Perplexity | None = None
        if (long := documents.first(length)).kept and length > short:
            self._text = Perplexity(long, [short, length], "tail", source, pretraining_length=short)

    @property
    def rounds(self) -> list[int]:
        """Documents of each, in whole passes."""
        least = max(_FIRST_ROUND, self._recall.least_documents)
        return sorted({self._recall.of_first(count).count for count in (least, 2 * _FIRST_ROUND, self._recall.count)})

    @property
    def labels(self) -> list[str]:
        return [label_of(subject) for subject in self.candidates]

    def request(self) -> dict[str, Any]:
        """The candidates and documents, before a budget keeps fewer. The perplexities follow from them."""
        subjects = [subject.identity._asdict() for subject in (self.base, *self.candidates)]
        return {"subjects": subjects, "recall": self._recall.request(), **self._factory.request()}

    def _work(self, rounds: Sequence[int], left: int, before: int = 0) -> Counter[int]:
        """Tokens to read by the length of the pass, if half of the candidates stay in each round.

        left: number of candidates. before: documents of the round before.
        """
        work = Counter[int]()

        def add(task: Task, times: int) -> None:
            for length, tokens in task.work().items():
                work[length] += times * tokens

        for count in rounds:
            for task in self._recall.only("far").of_first, self._short_of:
                add(task(count), left)
                add(task(before), -left)
            before, left = count, (left + 1) // 2
        add(self._recall.of_first(before).only("absent", "far", shorter=True), 1)
        add(self._recall.of_first(before).only("far"), -1)
        if text := self._text_of(before):
            add(text, 1)
        return work

    def fit(self, store: Store, budget: float | None = None) -> float:
        """Keep the candidates and documents whose measuring fits the budget, seconds. Returns the estimated seconds.

        By the time of short passes, which counts. A resumed run keeps those that it began with. First go
        the last candidates, then documents. Raises MethodError with the least time if even two passes do not fit.
        """
        started, plans, kept = time.monotonic(), store.values(_PLAN), None
        speeds = self._speeds()

        def takes(count: int, candidates: int) -> float:
            recall = self._recall.of_first(count)
            work = self._of_base.of_first(count).work() + self._short_of(count).work()
            work += self._work([least for least in self.rounds if least < count] + [recall.count], candidates)
            per_token = {
                length: np.mean([speed.seconds_per_token(length) for speed in speeds[:candidates]]) for length in work
            }
            return float(sum(tokens * per_token[length] for length, tokens in work.items()))

        of_all = self._recall.count, len(self.candidates)
        if budget is not None:
            least = min(_LEAST_CANDIDATES, of_all[1])
            counts = sorted({self._recall.least_documents, *self.rounds}, reverse=True)
            options = [(count, size) for count in counts for size in range(of_all[1], least - 1, -1)]
            options += [(counts[-1], size) for size in range(least - 1, 0, -1)]
            left = budget - (time.monotonic() - started)
            kept = plans.get(_PLAN_KEY) or next((plan for plan in options if takes(*plan) <= left), None)
            if kept is None:
                needed = takes(*options[-1]) + budget - left
                least_time = f"one candidate on {counts[-1]} documents takes {duration(needed)}"
                raise MethodError(
                    f"--budget is {duration(budget)}; {least_time}. Allow more: --budget {ceil(1.2 * needed)}s."
                )
            store.add(_PLAN, _PLAN_KEY, list(kept), later=True)
        count, size = kept or of_all
        estimated = takes(count, size)
        self.candidates, self._recall = self.candidates[:size], self._recall.of_first(count)
        if (count, size) != of_all:
            documents = f"{self._recall.count} documents"
            say(f"In {duration(budget or 0)} there is time for {documents} and {', '.join(self.labels)}.")
        return estimated

    def _speeds(self) -> list[Speed]:
        """The speed of each candidate, from passes of up to a quarter of the length.

        One that does not remap distances is as fast as the base; one that does, as the first of them.
        """
        ids, longest, _ = self._recall.longest()
        lengths = [max(2, longest // share) for share in _SHARES_TO_TIME]
        remaps = [subject.spec.method.remaps for subject in self.candidates]
        speeds = dict[bool, Speed]()
        with progress_bar("estimating the time", None) as step:
            for remapping in dict.fromkeys(remaps):
                subject = self.candidates[remaps.index(True)] if remapping else self.base
                speeds[remapping] = speed = Speed()
                with self._factory.open(subject, self._tokenizer) as reader:
                    reader.prepare(ids, longest)
                    list(reader.losses([Window(ids[: lengths[0]], 1, lengths[0])]))  # the very first pass is slow
                    for length in lengths:
                        step(phase=f"estimating the time from {length:,} tokens")
                        started = time.monotonic()
                        list(reader.losses([Window(ids[:length], 1, length)]))
                        speed.add(length, length, time.monotonic() - started)
        return [speeds[remapping] for remapping in remaps]

    def _text_of(self, count: int) -> Perplexity | None:
        """On as many long documents as recall has, but no more than an interval needs."""
        return self._text.of_first(min(count, ENOUGH)) if self._text and count else None

    def _short_of(self, count: int) -> Perplexity:
        """On a round's documents, but on enough for an interval that decides."""
        return self._short.of_first(max(count, ENOUGH) if count else 0)

    def choose(self, store: Store) -> Choice:
        """Measure and choose.

        Raises DataError if the base does not copy a passage nearby, which recall refers to.
        """
        self._store = store
        left: list[Measured] = []
        dropped: list[Measured] = []
        subjects = self.candidates
        with self._progress.shown():
            of_all = self._work(self.rounds, len(subjects))
            base, *_ = next(self._measure([], self._recall, later=of_all))
            base.as_reference()
            for number, count in enumerate(self.rounds, 1):
                measured = list(self._round(subjects, number))
                if not measured:
                    raise NotFiniteError("Every candidate overflows. Try another --dtype.")
                keep = len(measured) if number == len(self.rounds) else (len(measured) + 1) // 2
                left = halved(measured, keep, self._most_cost)
                dropped = [*sorted({*measured} - {*left}, key=_LOSS), *dropped]
                subjects = [candidate.subject for candidate in left]
                best = f"best {left[0].label}, {len(left)} of {len(measured)} left"
                say(f"Round {number} of {len(self.rounds)}, {count} documents: {best}.")
            choice = self._choice(left, dropped)
        self._factory.release()
        return choice

    def _round(self, subjects: Sequence[Subject], number: int) -> Iterator[Measured]:
        count, bar = self.rounds[number - 1], f"round {number} of {len(self.rounds)}, "
        recall = self._recall.of_first(count).only("far")
        later = self._work(self.rounds[number:], (len(subjects) + 1) // 2, count)
        (base, of_short), *others = self._measure(subjects, recall, bar, later)
        reference = base.as_reference(certain=False)
        for subject, reports in zip(subjects, others, strict=True):
            if reports:
                [far], [loss] = (report.cells for report in reports)
                yield Measured(subject, far, loss_change(loss, of_short.cells[0]), reference.recall(far))

    def _choice(self, left: Sequence[Measured], dropped: Sequence[Measured]) -> Choice:
        within = [candidate for candidate in left if candidate.gains and not candidate.costs_more(self._most_cost)]
        if within:
            within = decide(
                within,
                within[0].far.samples,
                Measured.is_certainly_worse,
                lambda candidate, other: candidate.cost.change > other.cost.change,
            )
        by_loss = sorted(left, key=_LOSS)
        subjects = [each.subject for each in [*within, *by_loss][:1] if each.subject is not self.base]
        recalls, *others = self._all_lengths(subjects, with_text=by_loss[0].gains)
        return Choice(within[0] if within else None, [*by_loss, *dropped], [*recalls, *chain(*others)])

    def _all_lengths(self, subjects: Sequence[Subject], *, with_text: bool) -> list[list[Any]]:
        """The reports of the base and the subjects by task, on all documents: recall, short and long texts."""
        recall = self._recall.only("absent", "far", shorter=True)  # the near arm is the base's
        measured = filter(None, self._measure(subjects, recall, "all lengths, ", last=with_text))
        recalls, *others = zip(*measured, strict=True)
        reference = recalls[0].as_reference(certain=False)
        return [[replace(report, reference=reference) for report in recalls], *map(list, others)]

    def add_trained(self, choice: Choice, patched: Subject, trained: Subject) -> Choice:
        """The choice with what was trained of it. Raises NotFiniteError if that overflows."""
        self._trained = trained
        subjects = [trained] if patched is self.base else [patched, trained]
        with self._progress.shown():
            recalls, shorts, *text = self._all_lengths(subjects, with_text=True)
        if len(recalls) <= len(subjects):
            raise NotFiniteError("The trained model overflows. Try another --dtype.")
        report, length = recalls[-1], self._recall.lengths[-1]
        cost = loss_change(shorts[-1].cells[0], shorts[0].cells[0])
        measured = Measured(trained, report.arm("far", length), cost, report.recall(length))
        return replace(choice, trained=measured, reports=[*recalls, *shorts, *chain(*text)])

    @property
    def measured_on(self) -> list[np.ndarray]:
        """The token ids of each document, up to the length."""
        return [document.ids for document in self._recall.documents.kept]

    def two_losses(self, choice: Choice) -> tuple[list[Scored], list[Scored], float]:
        """The far passes and the short texts to score in training, and the loss of the base on these, nats."""
        short = self._short_of(self._recall.count)
        base = next(report for report in choice.reports if report.task == short.name)
        return self._recall.only("far").passes(), short.texts(), base.cells[0].value

    def _measure(
        self,
        subjects: Sequence[Subject],
        recall: Recall,
        bar: str = "",
        later: Work | None = None,
        *,
        last: bool = False,
    ) -> Iterator[list[Any]]:
        """The reports of the base, then of each subject; none if it overflows. What was measured is not read again.

        First that of recall, then those of perplexity: of short texts, and of long ones.

        recall: with its documents and arms; the base has all arms. later: work to expect after this. last: whether to
        measure long texts too. Raises NotFiniteError if the base overflows.
        """
        short = self._short_of(recall.count)
        text = self._text_of(recall.count) if last and subjects else None
        of_base, of_subject = ([text.only(text.lengths[end])] if text else [] for end in (0, -1))
        steps = [(self.base, [self._of_base.of_first(recall.count), short, *of_base])]
        steps += [(subject, [recall, short, *of_subject]) for subject in subjects]
        for number, (subject, tasks) in enumerate(steps):
            ahead = [(task, self._part(each, task)) for each, of_each in steps[number:] for task in of_each]
            self._progress.expect(*(self._store.unread(*job) for job in ahead), later or {})
            try:
                yield [self._report(subject, task, bar) for task in tasks]
            except NotFiniteError:
                if subject is self.base:
                    raise
                yield []

    def _report(self, subject: Subject, task: Task, bar: str) -> Report:
        job, part = Job(subject, task, self._tokenizer), self._part(subject, task)
        return measure_job(job, self._factory, self._store, part, self._progress, bar + part)

    def _part(self, subject: Subject, task: Task) -> str:
        label = "base" if subject is self.base else "trained" if subject is self._trained else label_of(subject)
        kind = "recall" if isinstance(task, Recall) else "text" if task.name == "tail" else "short"
        return f"{label}, {kind}"
