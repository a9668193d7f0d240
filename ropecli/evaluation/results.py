"""Results of an evaluation: sums per document, perplexity per length with its interval, changes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Annotated

import numpy as np
from annotated_types import Interval

from ropecli.errors import DataError, NotFiniteError, RopecliError
from ropecli.evaluation.protocols import Protocol

_RESAMPLES = 1000
_PICKED_AT_ONCE = 2**20
"""Documents, to bound the memory."""
_NORMAL = 1.959964
_FEW = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060)
_LARGEST_NLL = 700.0
"""exp of anything larger overflows float64."""
_EDGES = np.array(sorted({2**power for power in range(40)} | {3 * 2**power for power in range(39)}))
"""Edges of the context buckets, tokens: 1, 2, 3, 4, 6, 8, 12, 16, 24, …"""


@dataclass
class Tally:
    """Sums over the scored tokens of one document at one length. Holds only numbers, so that it can be saved as JSON.

    nll: nats. bytes: bytes of the scored text; None if unknown. window_means: sum of the windows' mean losses. windows:
    number of windows. read: tokens the model read. seconds: wall time. peak_memory: bytes. context_nll, context_tokens:
    losses and tokens by the number of tokens before them, in the buckets of _EDGES.
    """

    nll: float = 0.0
    tokens: int = 0
    bytes: int | None = 0
    window_means: float = 0.0
    windows: int = 0
    read: int = 0
    seconds: float = 0.0
    peak_memory: int = 0
    context_nll: list[float] = field(default_factory=list)
    context_tokens: list[int] = field(default_factory=list)

    def is_finite(self) -> bool:
        return math.isfinite(self.nll)

    def add(self, nll: np.ndarray, contexts: np.ndarray, scored_bytes: int | None) -> None:
        """Add one window. nll: nats. contexts: number of tokens before each target. Both have shape (targets,)."""
        if not len(nll):
            return
        self.nll += float(nll.sum())
        self.tokens += len(nll)
        self.bytes = None if self.bytes is None or scored_bytes is None else self.bytes + scored_bytes
        self.window_means += float(nll.mean())
        self.windows += 1
        buckets = np.searchsorted(_EDGES, contexts, side="right") - 1
        self.context_nll = _add(self.context_nll, np.bincount(buckets, weights=nll).tolist())
        self.context_tokens = _add(self.context_tokens, np.bincount(buckets).tolist())


def _add(one: list, other: list) -> list:
    return [left + right for left, right in zip_longest(one, other, fillvalue=0)]


# The limits are checked by pydantic when a report is read back, and only then.
TokenCount = Annotated[int, Interval(gt=0, le=10**12)]
Count = Annotated[int, Interval(ge=0, le=10**18)]
Amount = Annotated[float, Interval(ge=0, le=1e15)]
Perplexity = Annotated[float, Interval(ge=0.5, le=1e305)]  # a perplexity of 1 may be slightly less after rounding


@dataclass(frozen=True)
class Bucket:
    """Scored tokens with start ≤ context < stop tokens before them. nll: mean loss, nats."""

    start: TokenCount
    stop: Annotated[int, Interval(gt=1, le=10**12)]
    tokens: TokenCount
    nll: float


@dataclass(frozen=True)
class LengthResult:
    """Perplexity at one length. nll: mean over scored tokens, nats; mean of the windows' means for the protocol `yarn`.

    ppl_low, ppl_high: 95% bootstrap interval over documents; None for a single document. bits_per_byte: of the scored
    text; None if its number of bytes is unknown. document_nll, document_weights: shape (documents,), so that nll =
    Σ document_nll / Σ document_weights. seconds: wall time of the passes, which may also serve other lengths.
    tokens_per_second: tokens read, not scored. peak_memory: bytes, of the process on a CPU, of torch on a GPU.
    by_context: mean loss by the number of tokens before the scored one.
    """

    length: TokenCount
    ppl: Perplexity
    nll: float
    ppl_low: Perplexity | None
    ppl_high: Perplexity | None
    bits_per_byte: Amount | None
    tokens: TokenCount
    documents: TokenCount
    document_nll: tuple[float, ...]
    document_weights: tuple[float, ...]
    by_context: tuple[Bucket, ...] = ()
    # cost of the run, not part of the measurement
    seconds: Amount = field(default=0.0, compare=False)
    tokens_per_second: Amount = field(default=0.0, compare=False)
    peak_memory: Count = field(default=0, compare=False)


def summarise(length: int, tallies: Sequence[Tally], names: Sequence[str], *, by_windows: bool = False) -> LengthResult:
    """The result at one length. by_windows: take the unweighted mean over windows, like YaRN's script.

    Raises NotFiniteError for a loss that is not finite, DataError if there are no tokens.
    """
    sums = np.array([one.window_means if by_windows else one.nll for one in tallies])
    weights = np.array([one.windows if by_windows else one.tokens for one in tallies], dtype=np.float64)
    if not weights.sum():
        raise DataError(f"No tokens to score at length {length}: the documents are too short.")
    _refuse_not_finite(length, sums, names)
    nll = float(sums.sum() / weights.sum())
    if nll > _LARGEST_NLL:
        raise NotFiniteError(f"The mean loss at length {length} is {nll:.4g} nats: perplexity overflows.")
    low, high = _interval(sums, weights)
    seconds = sum(one.seconds for one in tallies)
    text = [one.bytes for one in tallies if one.bytes is not None]
    known = len(text) == len(tallies) and sum(text) > 0
    return LengthResult(
        length=length,
        ppl=math.exp(nll),
        nll=nll,
        ppl_low=low and max(low, 1.0),  # no loss is below zero
        ppl_high=high,
        bits_per_byte=sum(one.nll for one in tallies) / math.log(2) / sum(text) if known else None,
        tokens=sum(one.tokens for one in tallies),
        documents=len(tallies),
        document_nll=tuple(sums.tolist()),
        document_weights=tuple(weights.tolist()),
        by_context=_buckets(tallies),
        seconds=seconds,
        tokens_per_second=sum(one.read for one in tallies) / seconds if seconds else 0.0,
        peak_memory=max(one.peak_memory for one in tallies),
    )


def _refuse_not_finite(length: int, sums: np.ndarray, names: Sequence[str]) -> None:
    bad = np.flatnonzero(~np.isfinite(sums))
    if len(bad):
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise NotFiniteError(
            f"The loss is not finite at length {length} in {names[bad[0]]}{more}: the model overflows. Try another "
            "--dtype."
        )


def _buckets(tallies: Sequence[Tally]) -> tuple[Bucket, ...]:
    nll: list[float] = []
    tokens: list[int] = []
    for one in tallies:
        nll, tokens = _add(nll, one.context_nll), _add(tokens, one.context_tokens)
    return tuple(
        Bucket(int(_EDGES[i]), int(_EDGES[i + 1]), count, nll[i] / count) for i, count in enumerate(tokens) if count
    )


def _interval(sums: np.ndarray, weights: np.ndarray) -> tuple[float, float] | tuple[None, None]:
    """95% bootstrap interval of exp(Σ sums / Σ weights) over documents; None for fewer than two with tokens.

    Percentiles from few documents are too narrow. They are widened by the ratio of Student's t to the normal
    distribution, the idea of the expanded percentile interval (Hesterberg 2015, arXiv:1411.5279).
    """
    sums, weights = sums[weights > 0], weights[weights > 0]
    documents = len(sums)
    if documents < 2:
        return None, None
    centre = sums.sum() / weights.sum()
    ends = np.quantile(_resampled_means(sums, weights), (0.025, 0.975)) - centre
    wider = math.sqrt(documents / (documents - 1)) * _student_t(documents - 1) / _NORMAL
    low, high = np.exp(np.minimum(centre + wider * ends, _LARGEST_NLL))
    return float(low), float(high)


def _resampled_means(sums: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Σ sums / Σ weights of documents sampled with replacement, with a fixed seed; shape (resamples,)."""
    random, documents = np.random.default_rng(0), len(sums)
    at_once = max(1, _PICKED_AT_ONCE // documents)
    means = []
    for start in range(0, _RESAMPLES, at_once):
        picks = random.integers(0, documents, (min(at_once, _RESAMPLES - start), documents))
        means.append(sums[picks].sum(axis=1) / weights[picks].sum(axis=1))
    return np.concatenate(means)


def _student_t(freedom: int) -> float:
    """The 97.5% quantile of Student's t, from a table or the Cornish-Fisher expansion, to four digits."""
    if freedom <= len(_FEW):
        return _FEW[freedom - 1]
    z, n = _NORMAL, float(freedom)
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)


@dataclass(frozen=True)
class PerplexityChange:
    """Relative change between two results on the same tokens: 0.05 is 5% higher. low, high: 95% interval, paired."""

    change: float
    low: float | None
    high: float | None


def paired_change(row: LengthResult, base: LengthResult) -> PerplexityChange:
    """The change from `base` to `row`. Raises RopecliError if their tokens differ."""
    if row.document_weights != base.document_weights:
        raise RopecliError("Cannot compare perplexities of different tokens.")
    weights = np.array(row.document_weights)
    difference = np.array(row.document_nll) - np.array(base.document_nll)
    low, high = _interval(difference, weights)
    change = math.expm1(min(float(difference.sum() / weights.sum()), _LARGEST_NLL))
    return PerplexityChange(change, None if low is None else low - 1, None if high is None else high - 1)


@dataclass(frozen=True)
class Headline:
    """A change of perplexity relative to the baseline, paired by document: -0.07 is 7% lower.

    length: the model's length. baseline_length: the baseline's length for the same target tokens.
    """

    name: str
    length: TokenCount
    baseline_length: TokenCount
    change: PerplexityChange


def headlines(
    rows: Sequence[LengthResult], baseline: Sequence[LengthResult], protocol: Protocol, original_length: int
) -> list[Headline]:
    """Compute the short-context cost and the long-context gain, as far as the lengths allow.

    original_length: the baseline's pretraining length, tokens. The cost compares both at the longest length up to it.
    The gain compares the model at its longest length beyond it with the baseline at the longest length up to it. This
    requires a protocol that scores the same tokens at every length; other protocols compare both at the longest length.
    """
    own, base = ({row.length: row for row in of} for of in (rows, baseline))
    inside = max((length for length in own if length <= original_length), default=None)
    longest = max(own)
    found = []
    if inside is not None:
        found.append(Headline("short-context cost", inside, inside, paired_change(own[inside], base[inside])))
    if longest > original_length and not protocol.scores_the_same_tokens:
        change = paired_change(own[longest], base[longest])
        found.append(Headline("change beyond the pretraining length", longest, longest, change))
    elif longest > original_length and inside is not None:
        found.append(Headline("long-context gain", longest, inside, paired_change(own[longest], base[inside])))
    return found


def wilson(hits: float, trials: int) -> tuple[float, float]:
    """Wilson score interval (95%) of a proportion; not empty even if all trials are hits (Wilson 1927)."""
    share, correction = hits / trials, _NORMAL * _NORMAL / trials
    middle = (share + correction / 2) / (1 + correction)
    half = _NORMAL / (1 + correction) * math.sqrt(share * (1 - share) / trials + correction / (4 * trials))
    return max(0.0, middle - half), min(1.0, middle + half)
