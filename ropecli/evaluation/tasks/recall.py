"""Recall: whether a model uses far text. A passage is repeated at the end of a sample, and its loss tells.

A sample has arms of one length, with the same scored tokens and the same filler:

- absent: lead-in, another passage, filler, cue, rest
- far: lead-in, passage, filler, cue, rest
- near: lead-in, beginning of the filler, passage, its last 80 tokens, cue, rest

The passage is the cue and the rest. Only the rest is scored: no model can know that a repetition begins. The lead-in
is longer than the sinks that a method keeps (4 to 100 tokens), which would be read at any distance. Filler is text of
other documents; a longer one begins earlier, so that what stands before the cue is the same at every length.

This is literal copying, the induction of Olsson et al. 2022 (arXiv:2209.11895).
"""

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from itertools import groupby, takewhile
from typing import Any

import numpy as np

from ropecli.data.documents import Documents
from ropecli.errors import DataError
from ropecli.evaluation.driver import SampleId, Task, Values
from ropecli.evaluation.protocols import CUE, PASSAGE, Protocol, Window
from ropecli.evaluation.readers.reader import Reader
from ropecli.evaluation.report import ARMS, Cell
from ropecli.evaluation.request import PerplexityOptions, document_source
from ropecli.evaluation.subject import Subject, choose_lengths
from ropecli.evaluation.tasks.perplexity import have_same_tokens, refuse_overflow
from ropecli.evaluation.texts import read_texts
from ropecli.hashing import digest
from ropecli.live.loading import load_tokenizer
from ropecli.messages import warn

_PASSAGES = 2
"""Samples per document."""
_SCORED = PASSAGE - CUE
_GAP = 80
"""Tokens between the passage and its repetition in the near arm."""
_SHORTEST_LEAD, _LONGEST_LEAD = 16, 128
"""Tokens of the lead-in; between them, a sixteenth of the pretraining length."""
_RUN = 8
"""A document that shares this many tokens in a row with a passage is not used around it."""


class Recall(Task):
    """Raises DataError for lengths that do not fit, for a single document, and for documents that repeat each other.

    lengths: tokens. pretraining_length: of the first subject, tokens; the longest length within it has a near arm.
    tokenizer: to compare greedy copies by their text; None to score losses.
    """

    kind = name = "recall"
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
        self._alone = self._find_alone()

    def up_to(self, length: int) -> "Recall":
        """The same samples at the lengths up to `length`, and at that of the near arm."""
        task = copy(self)
        task.lengths = [shorter for shorter in self.lengths if shorter <= max(length, self.near)]
        return task

    def of_first(self, count: int) -> "Recall":
        """The samples of the first documents, among the text of all."""
        task = copy(self)
        task.count = min(count, self.count)
        return task

    def only(self, *arms: str) -> "Recall":
        """The samples of some arms at the longest length."""
        task = copy(self)
        task.lengths, task.arms = self.lengths[-1:], arms
        return task

    @property
    def needs_losses(self) -> bool:
        return not self.answers

    @property
    def settings(self) -> dict[str, Any]:
        sizes = {"passage": PASSAGE, "cue": CUE, "passages_per_document": _PASSAGES, "lead_in": self.lead}
        return {**sizes, "near": self.near, "mode": "generate" if self.answers else "losses"}

    def request(self) -> dict[str, Any]:
        return {"protocol": self.name, "lengths": self.lengths, "data": self.fingerprint({}), **self.settings}

    def longest(self) -> tuple[np.ndarray, int, int]:
        largest = max(int(document.ids.max()) for document in self.documents.kept)
        longest = self._arm(self.lengths[-1], "absent", 0)
        return longest[:-_SCORED] if self.answers else longest, self.lengths[-1], largest

    def samples(self, *, one_pass: bool) -> list[SampleId]:
        numbers = self._numbers()
        return [(length, arm, number) for length in self.lengths for arm in self._arms_at(length) for number in numbers]

    def _numbers(self) -> list[int]:
        """The numbers of the passages."""
        return [number for number in range(_PASSAGES * self.count) if number not in self._alone]

    def _by_document(self) -> dict[int, list[int]]:
        """The numbers of the passages of each document that has one."""
        return {document: list(numbers) for document, numbers in groupby(self._numbers(), lambda n: n // _PASSAGES)}

    def _arms_at(self, length: int) -> list[str]:
        return [arm for arm in self.arms if arm != "near" or length == self.near]

    def tokens(self, sample: SampleId) -> int:
        return int(sample[0])

    def score(self, reader: Reader, batch: Sequence[SampleId]) -> list[Any]:
        """The loss of each sample, summed over the scored tokens."""
        ids = [self._arm(*sample) for sample in batch]
        return self._copying(reader, ids) if self.answers else self._losses(reader, ids)

    def _losses(self, reader: Reader, samples: Sequence[np.ndarray]) -> list[float]:
        windows = (Window(ids, _SCORED, len(ids), reads_last=False) for ids in samples)
        return [float(losses.sum()) for losses in reader.losses(windows)]

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

    def _arm(self, length: int, arm: str, number: int) -> np.ndarray:
        """Ids, shape (length,)."""
        document, passage = self._passage(number)
        following = next(self._others(document, passage, step=1))
        prefix = self.documents.special.prefix
        lead = np.concatenate([prefix, np.resize(following, self.lead - len(prefix))]).astype(np.int64)
        filler = self._filler(document, passage, length - self.lead - 2 * PASSAGE)
        begin, end = np.split(filler, [max(0, len(filler) - _GAP)])
        before = {"absent": [_middle(following), filler], "far": [passage, filler], "near": [begin, passage, end]}
        return np.concatenate([lead, *before[arm], passage])

    def _passage(self, number: int) -> tuple[int, np.ndarray]:
        """The document of a passage, and its ids."""
        document, part = divmod(number, _PASSAGES)
        return document, _middle(np.array_split(self._texts[document], _PASSAGES)[part])

    def _filler(self, document: int, passage: np.ndarray, size: int) -> np.ndarray:
        """Text of the documents before this one, repeated if they are too short; shape (size,)."""
        parts: list[np.ndarray] = []
        missing = size
        while missing > 0:
            for text in self._others(document, passage, step=-1):
                parts.insert(0, text[max(0, len(text) - missing) :])
                missing -= len(parts[0])
                if missing <= 0:
                    break
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _others(self, document: int, passage: np.ndarray, step: int) -> Iterator[np.ndarray]:
        """The texts of the other documents that do not repeat the passage, in both directions round about."""
        for distance in range(1, len(self._texts)):
            index = (document + step * distance) % len(self._texts)
            if index not in self._runs:
                self._runs[index] = np.unique(_runs_of(self._texts[index]))
            first, end = (np.searchsorted(self._runs[index], _runs_of(passage), side) for side in ("left", "right"))
            if (first == end).all():  # in none of them; faster than np.isin, which would sort the document's again
                yield self._texts[index]

    def _find_alone(self) -> set[int]:
        """The passages that every other document repeats, which are left out. Raises DataError if those are all."""
        numbers = range(_PASSAGES * self.count)
        alone = {number for number in numbers if next(self._others(*self._passage(number), step=1), None) is None}
        what = f"recall needs passages without {_RUN} tokens in a row that every other document has"
        if len(alone) == len(numbers):
            raise DataError(f"{what}. These documents repeat each other: use others.")
        if alone:
            warn(f"{what}: leaving out {len(alone)} of {len(numbers)}.")
        return alone

    def cells(self, values: Values) -> list[Cell]:
        """A cell per length and arm, with the sums of each document. Raises NotFiniteError."""
        passages = self._by_document()
        names, cells = [self.documents.names[document] for document in passages], []
        weights = np.array([float(len(numbers) * _SCORED) for numbers in passages.values()])
        for length in self.lengths:
            for arm in self._arms_at(length):
                losses = [[values[length, arm, number] for number in numbers] for numbers in passages.values()]
                sums = np.array([sum(of_document) for of_document in losses], dtype=float)
                refuse_overflow(sums, weights, length, names)
                cells.append(
                    Cell(arm, length, tuple(sums.tolist()), tuple(weights.tolist()), tokens=int(weights.sum()))
                )
        return cells

    def identities(self) -> list[str]:
        return [digest(*(self._passage(number)[1] for number in numbers)) for numbers in self._by_document().values()]

    def fingerprint(self, values: Values) -> str:
        return digest(self.documents.fingerprint(), self.lead)


def lead_in(pretraining_length: int) -> int:
    return min(_LONGEST_LEAD, max(_SHORTEST_LEAD, pretraining_length // 16))


def shortest_length(pretraining_length: int) -> int:
    return lead_in(pretraining_length) + 2 * PASSAGE


def _middle(text: np.ndarray) -> np.ndarray:
    start = (len(text) - PASSAGE) // 2
    return text[start : start + PASSAGE]


def _runs_of(ids: np.ndarray) -> np.ndarray:
    """A hash of each run of tokens."""
    powers = np.uint64(0x9E3779B97F4A7C15) ** np.arange(_RUN, dtype=np.uint64)
    return np.lib.stride_tricks.sliding_window_view(ids.astype(np.uint64) + np.uint64(1), _RUN) @ powers


def make_recall(
    subjects: Sequence[Subject],
    first: Subject,
    options: PerplexityOptions,
) -> list[tuple[Recall, Any]]:
    """The task and its tokenizer for each subject. Raises DataError, CheckpointError.

    first: recall refers to it.
    """
    tokenizer = load_tokenizer(subjects[0].checkpoint)
    for checkpoint in {id(subject.checkpoint): subject.checkpoint for subject in subjects[1:]}.values():
        if checkpoint is not subjects[0].checkpoint and not have_same_tokens(tokenizer, load_tokenizer(checkpoint)):
            raise DataError(
                f"recall compares the same tokens, and {checkpoint.name} has another tokenizer than "
                f"{subjects[0].checkpoint.name}. Measure each by itself."
            )
    pretraining_length = first.positions.pretraining_length
    least = shortest_length(pretraining_length)
    chosen = choose_lengths(options["lengths"], [first, *subjects], lambda length: length >= least)
    documents, _ = read_texts(options, tokenizer, chosen, Protocol("recall"))
    copies = tokenizer if options["generate"] else None
    task = Recall(documents, chosen, pretraining_length, document_source(options).place, copies)
    return [(task, tokenizer)] * len(subjects)
