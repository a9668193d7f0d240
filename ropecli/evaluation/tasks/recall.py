"""Recall: whether a model uses far text. Passages are repeated at the end of a pass, and their loss tells.

A pass is read in arms of one length, with the same scored tokens and the same filler:

- absent: lead-in, other passages, filler, repetitions
- far: lead-in, passages, filler, repetitions
- near: lead-in, beginning of the filler, passages, its last 80 tokens, repetitions

The repetitions are shuffled. Each begins with its cue, which is not scored: no model can know that a repetition
begins. A pass has the passages of as many whole documents as fit twice into an eighth of the shortest length, and of no
more than a third of the documents; else one passage. The lead-in is longer than the sinks that a method keeps (4 to 100
tokens), which would be read at any distance. Filler is text of other documents; a longer one begins earlier, so that
what stands before the repetitions is the same at every length.

This is literal copying, the induction of Olsson et al. 2022 (arXiv:2209.11895).
"""

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from itertools import chain, cycle, groupby, islice, pairwise, takewhile
from typing import Any

import numpy as np

from ropecli.data.documents import Documents
from ropecli.errors import DataError
from ropecli.evaluation.copies import runs_of
from ropecli.evaluation.driver import SampleId, Task, Values
from ropecli.evaluation.lengths import Lengths
from ropecli.evaluation.protocols import CUE, PASSAGE, Protocol, Window
from ropecli.evaluation.readers.reader import Reader
from ropecli.evaluation.report import ARMS, Cell
from ropecli.evaluation.statistics import Bucket
from ropecli.evaluation.subject import Subject
from ropecli.evaluation.tasks.perplexity import refuse_overflow
from ropecli.evaluation.texts import read_texts
from ropecli.hashing import digest
from ropecli.messages import warn
from ropecli.options import PerplexityOptions

_PASSAGES = 2
"""Passages per document."""
_OF_LENGTH, _OF_DOCUMENTS = 8, 3
"""Passages and repetitions take an eighth of the shortest length at most, and passages a third of the documents."""
_SCORED = PASSAGE - CUE
_GAP = 80
"""Tokens between the passages and their repetitions in the near arm."""
_SHORTEST_LEAD, _LONGEST_LEAD = 16, 128
"""Tokens of the lead-in; between them, a sixteenth of the pretraining length."""
_RUN = 8
"""A document that shares this many tokens in a row with a passage is not used around it."""
_DISTANCES = 3
"""Parts of the range of distances, for the mean loss of each."""


class Recall(Task):
    """Raises DataError for lengths that do not fit, for a single document, and for documents that repeat each other.

    A sample is (length, arm, number of the first passage of the pass); its value has the loss of each passage.

    lengths: tokens. pretraining_length: of the first subject, tokens; the longest length within it has a near arm.
    tokenizer: to compare greedy copies by their text; None to score losses. passages: the most of a pass.
    """

    name = "recall"
    one_tokenizer = True
    documents: Documents

    def __init__(
        self,
        documents: Documents,
        lengths: Iterable[int],
        pretraining_length: int,
        source: str = "",
        tokenizer: Any = None,
    ) -> None:
        self.documents, self.source, self.tokenizer = documents, source, tokenizer
        self.lengths, self.lead = sorted(set(lengths)), lead_in(pretraining_length)
        self.answers = tokenizer is not None
        least = shortest_length(pretraining_length)
        if self.lengths[0] < least or self.lengths[0] > pretraining_length:
            raise DataError(
                f"The shortest length is {self.lengths[0]} tokens. recall needs at least {least}, and a length within "
                f"the pretraining length of the first checkpoint, {pretraining_length} tokens."
            )
        self.near = max(length for length in self.lengths if length <= pretraining_length)
        if len(documents.kept) < 2:
            raise DataError("recall needs two documents or more: the passage is of one, the text around it of others.")
        self.count = len(documents.kept)
        self.arms: Sequence[str] = ARMS
        self._texts = [documents.special.bare(document.ids) for document in documents.kept]
        self._runs: dict[int, np.ndarray] = {}  # by document
        self._passes = self._make_passes()
        self.passages = max(map(len, self._passes.values()))

    def up_to(self, length: int) -> "Recall":
        """The same samples at the lengths up to `length`, and at that of the near arm."""
        task = copy(self)
        task.lengths = [shorter for shorter in self.lengths if shorter <= max(length, self.near)]
        return task

    def of_first(self, count: int) -> "Recall":
        """The passes of the first documents, among the text of all. They may need a few documents more."""
        task = copy(self)
        task._passes = {first: numbers for first, numbers in self._passes.items() if first // _PASSAGES < count}
        last = [numbers[-1] // _PASSAGES + 1 for numbers in task._passes.values()]
        task.count = min(max([count, *last]), self.count)
        return task

    @property
    def least_documents(self) -> int:
        """Documents of two passes, which an interval needs."""
        return self.of_first(self.of_first(1).count + 1).count

    def only(self, *arms: str, shorter: bool = False) -> "Recall":
        """The samples of some arms, at the longest length. shorter: at all lengths."""
        task = copy(self)
        task.lengths, task.arms = self.lengths if shorter else self.lengths[-1:], arms
        return task

    @property
    def needs_losses(self) -> bool:
        return not self.answers

    @property
    def settings(self) -> dict[str, Any]:
        sizes = {"passage": PASSAGE, "cue": CUE, "passages_per_document": _PASSAGES, "lead_in": self.lead}
        least = [self._filler_size(length) + PASSAGE for length in self.lengths]
        per_pass = {"passages_per_pass": self.passages, "least_distances": least}
        return {**sizes, **per_pass, "near": self.near, "mode": "generate" if self.answers else "losses"}

    def request(self) -> dict[str, Any]:
        return {"protocol": self.name, "lengths": self.lengths, "data": self.fingerprint({}), **self.settings}

    def longest(self) -> tuple[np.ndarray, int, int]:
        largest = max(int(document.ids.max()) for document in self.documents.kept)
        longest = self._arm(self.lengths[-1], "absent", next(iter(self._passes)))
        return longest[:-_SCORED] if self.answers else longest, self.lengths[-1], largest

    def samples(self, *, one_pass: bool) -> list[SampleId]:
        return [(*read, first) for read in self._lengths_and_arms() for first in self._passes]

    def _pass_of(self) -> dict[int, int]:
        """The first passage of the pass of each passage."""
        return {number: first for first, numbers in self._passes.items() for number in numbers}

    def _by_document(self) -> dict[int, list[int]]:
        """The numbers of the passages of each document that has one."""
        numbers = chain(*self._passes.values())
        return {document: list(group) for document, group in groupby(numbers, lambda number: number // _PASSAGES)}

    def _make_passes(self) -> dict[int, list[int]]:
        """The numbers of the passages of each pass, by the first of them: of whole documents, or of one passage.

        Passages that repeat each other have a pass each. Raises DataError if every other document repeats them all.
        """
        parts = [range(_PASSAGES * document, _PASSAGES * (document + 1)) for document in range(self.count)]
        documents = [[number for number in part if next(self._others([number], 1), None) is not None] for part in parts]
        left = sum(map(len, documents))
        what = f"recall needs passages without {_RUN} tokens in a row that every other document has"
        if not left:
            raise DataError(f"{what}. These documents repeat each other: use others.")
        if alone := _PASSAGES * self.count - left:
            warn(f"{what}: leaving out {alone} of {_PASSAGES * self.count}.")
        documents = list(filter(None, documents))
        most = min(self.lengths[0] // (2 * PASSAGE * _PASSAGES * _OF_LENGTH), len(documents) // _OF_DOCUMENTS)
        size = 0 if self.answers else most
        passes: list[list[int]] = []
        for first in range(0, len(documents), max(1, size)):
            numbers = [*chain(*documents[first : first + max(1, size)])]
            others = len([*islice(self._others(numbers, 1), size)])
            together = size > 0 and others == size and self._differ(numbers)
            passes += [numbers] if together else [[number] for number in numbers]
        return {numbers[0]: numbers for numbers in passes}

    def _differ(self, numbers: Sequence[int]) -> bool:
        """Whether the passages share no more than an eighth of their runs."""
        runs = [np.unique(runs_of(self._passage(number), _RUN)) for number in numbers]
        return len(np.unique(np.concatenate(runs))) >= 7 / 8 * sum(map(len, runs))

    def _lengths_and_arms(self) -> list[tuple[int, str]]:
        """Each length with each of its arms."""
        return [(length, arm) for length in self.lengths for arm in self.arms if arm != "near" or length == self.near]

    def tokens(self, sample: SampleId) -> int:
        return int(sample[0])

    def score(self, reader: Reader, batch: Sequence[SampleId]) -> list[Any]:
        """The losses of each sample's passages, each summed over the scored tokens."""
        ids = [self._arm(*sample) for sample in batch]
        if self.answers:
            return [[loss] for loss in self._copying(reader, ids)]
        orders = [self._order(first) for _, _, first in batch]
        windows = (
            Window(sample, len(order) * PASSAGE - CUE, len(sample)) for sample, order in zip(ids, orders, strict=True)
        )
        return [
            [float(losses[place * PASSAGE :][:_SCORED].sum()) for place in np.argsort(order)]
            for losses, order in zip(reader.losses(windows), orders, strict=True)
        ]

    def passes(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """(ids, whether each is scored) of the passes of the arm `far` at the longest length; shape (length,) each."""
        texts = []
        for first, numbers in self._passes.items():
            ids = self._arm(self.lengths[-1], "far", first)
            repeated = np.tile(np.arange(PASSAGE) >= CUE, len(numbers))
            texts.append((ids, np.concatenate([np.zeros(len(ids) - len(repeated), bool), repeated])))
        return texts

    def _copying(self, reader: Reader, samples: Sequence[np.ndarray]) -> list[float]:
        """The scored tokens after the first wrong one of a greedy copy, by the share of its characters."""
        expected = [self.tokenizer.decode(ids[-_SCORED:]) for ids in samples]

        def right(index: int, tokens: Sequence[int]) -> tuple[int, bool]:
            text = self.tokenizer.decode(tokens).rstrip("\ufffd")  # half a character
            pairs = zip(text, expected[index], strict=False)
            same = len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])
            return same, same < len(text)

        def done(index: int, tokens: list[int]) -> bool:
            return right(index, tokens)[1]

        answers = reader.generate([ids[:-_SCORED] for ids in samples], _SCORED, done)
        shares = [right(index, tokens)[0] / len(expected[index]) for index, tokens in enumerate(answers)]
        return [_SCORED * (1 - share) for share in shares]

    def _arm(self, length: int, arm: str, first: int) -> np.ndarray:
        """Ids, shape (length,)."""
        numbers = self._passes[first]
        passages = [self._passage(number) for number in numbers]
        following = [*islice(self._others(numbers, step=1), len(numbers))]
        parts = -(-len(numbers) // len(following))
        absent = [_middle(part) for text in following for part in np.array_split(text, parts)][: len(numbers)]
        prefix = self.documents.special.prefix
        lead = np.concatenate([prefix, np.resize(following[0], self.lead - len(prefix))]).astype(np.int64)
        filler = self._filler(numbers, self._filler_size(length, len(numbers)))
        begin, end = np.split(filler, [max(0, len(filler) - _GAP)])
        before = {"absent": [*absent, filler], "far": [*passages, filler], "near": [begin, *passages, end]}
        return np.concatenate([lead, *before[arm], *(passages[place] for place in self._order(first))])

    def _order(self, first: int) -> np.ndarray:
        """The indices of a pass's passages in the order of their repetitions."""
        return np.random.default_rng(first).permutation(len(self._passes[first]))

    def _passage(self, number: int) -> np.ndarray:
        document, part = divmod(number, _PASSAGES)
        return _middle(np.array_split(self._texts[document], _PASSAGES)[part])

    def _filler_size(self, length: int, passages: int | None = None) -> int:
        """passages: of the pass; default: the most."""
        return length - self.lead - 2 * PASSAGE * (passages or self.passages)

    def _distances(self, first: int, length: int) -> np.ndarray:
        """Tokens from each passage of a pass to its repetition, in the arm `far`; shape (passages,)."""
        passages = len(self._passes[first])
        places = np.argsort(self._order(first)) + passages - np.arange(passages)
        return self._filler_size(length, passages) + PASSAGE * places

    def _filler(self, numbers: Sequence[int], size: int) -> np.ndarray:
        """Text of the documents before these passages, repeated if they are too short; shape (size,)."""
        parts: list[np.ndarray] = []
        texts, missing = cycle(self._others(numbers, step=-1)), size
        while missing > 0:
            parts.insert(0, next(texts)[-missing:])
            missing -= len(parts[0])
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _others(self, numbers: Sequence[int], step: int) -> Iterator[np.ndarray]:
        """The texts of other documents that do not repeat these passages, in both directions round about."""
        documents = {number // _PASSAGES for number in numbers}
        runs = np.concatenate([runs_of(self._passage(number), _RUN) for number in numbers])
        for distance in range(1, len(self._texts)):
            index = ((max(documents) if step > 0 else min(documents)) + step * distance) % len(self._texts)
            if index in documents:
                continue
            if index not in self._runs:
                self._runs[index] = np.unique(runs_of(self._texts[index], _RUN))
            first, end = (np.searchsorted(self._runs[index], runs, side) for side in ("left", "right"))
            if (first == end).all():  # in none of them; faster than np.isin, which would sort the document's again
                yield self._texts[index]

    def cells(self, values: Values) -> list[Cell]:
        """A cell per length and arm, with the sums of each document. Raises NotFiniteError."""
        documents, pass_of, cells = self._by_document(), self._pass_of(), []
        names = [self.documents.names[document] for document in documents]
        weights = np.array([float(len(numbers) * _SCORED) for numbers in documents.values()])
        for length, arm in self._lengths_and_arms():
            losses = {
                number: loss
                for first, numbers in self._passes.items()
                for number, loss in zip(numbers, values[length, arm, first], strict=True)
            }
            sums = np.array([sum(losses[number] for number in numbers) for numbers in documents.values()])
            refuse_overflow(sums, weights, length, names)
            shared: dict[str, Any] = {"tokens": int(weights.sum())}
            if self.passages > 1:
                shared["passes"] = tuple(pass_of[numbers[0]] for numbers in documents.values())
                shared["by_distance"] = self._by_distance(length, losses) if arm != "near" else ()
            cells.append(Cell(arm, length, tuple(sums.tolist()), tuple(weights.tolist()), **shared))
        return cells

    def _by_distance(self, length: int, losses: dict[int, float]) -> tuple[Bucket, ...]:
        """The mean loss by the distance from a passage to its repetition, in thirds of its range."""
        distances = np.concatenate([self._distances(first, length) for first in self._passes])
        values = np.array([losses[number] for number in chain(*self._passes.values())])
        edges = np.linspace(distances.min(), distances.max() + 1, _DISTANCES + 1).astype(int)
        parts = [(low, high, values[(low <= distances) & (distances < high)]) for low, high in pairwise(edges)]
        return tuple(
            Bucket(int(low), int(high), len(part) * _SCORED, float(part.mean() / _SCORED))
            for low, high, part in parts
            if len(part)
        )

    def identities(self) -> list[str]:
        """With the other passages of the pass, if there are any."""
        pass_of, digests = self._pass_of(), []
        for numbers in self._by_document().values():
            shared = [*numbers, *self._passes[pass_of[numbers[0]]]] if self.passages > 1 else numbers
            digests.append(digest(*(self._passage(number) for number in shared)))
        return digests

    def fingerprint(self, values: Values) -> str:
        return digest(self.documents.fingerprint(), self.lead)


def lead_in(pretraining_length: int) -> int:
    return min(_LONGEST_LEAD, max(_SHORTEST_LEAD, pretraining_length // 16))


def shortest_length(pretraining_length: int) -> int:
    return lead_in(pretraining_length) + 2 * PASSAGE


def _middle(text: np.ndarray) -> np.ndarray:
    start = (len(text) - PASSAGE) // 2
    return text[start : start + PASSAGE]


def make_recall(options: PerplexityOptions, tokenizer: Any, lengths: Lengths, first: Subject) -> Recall:
    """first: recall refers to it. Raises DataError."""
    pretraining_length = first.positions.pretraining_length
    least = shortest_length(pretraining_length)
    chosen = lengths.that_fit(lambda length: length >= least)
    documents, _ = read_texts(options, tokenizer, Lengths(tuple(chosen)), Protocol("recall"))
    copied = tokenizer if options["generate"] else None
    return Recall(documents, chosen, pretraining_length, options["data"], copied)
