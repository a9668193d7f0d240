"""One bar for a command that reads: the share done and the time left of all its jobs.

The cost of a token grows with the length of its pass, since attention looks back over all tokens before. So the time
left is estimated by length.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from ropecli.evaluation.readers.reader import Reader
from ropecli.messages import duration, progress_bar, say

Work = Mapping[int, float]
"""Tokens to read, by the length of the pass that reads them."""
_EQUAL_COST = 16_384
"""Length at which attention takes as long as the rest, about, until two lengths were measured."""
_SECONDS_BEFORE_ESTIMATE = 30


class Speed:
    """Seconds per token, which grow linearly with the length of the pass."""

    def __init__(self) -> None:
        self._tokens, self._seconds = Counter[int](), Counter[int]()

    def add(self, length: int, tokens: float, seconds: float) -> None:
        self._tokens[length] += tokens  # type: ignore[assignment]
        self._seconds[length] += seconds  # type: ignore[assignment]

    def seconds_per_token(self, length: int) -> float:
        """On the line through the shortest and the longest length, not below what was measured.

        0 before anything was measured.
        """
        rates = {key: self._seconds[key] / tokens for key, tokens in self._tokens.items() if tokens}
        if not rates:
            return 0.0
        short, long = min(rates), max(rates)
        if short == long:
            return rates[long] * (_EQUAL_COST + length) / (_EQUAL_COST + long)
        slope = (rates[long] - rates[short]) / (long - short)
        return max(rates[short] + slope * (length - short), min(rates.values()))


class Progress:
    """Shows what a command has read, within a sample too. Says once if the rest takes more than an hour.

    jobs: the work of each. advice: what is said then, too.
    """

    def __init__(self, jobs: Sequence[Work], advice: str = "") -> None:
        self._later, self._advice = [Counter(job) for job in jobs], advice
        self._now = Counter[int]()
        """The rest of the current job, without its current batch."""
        self._length, self._batch = 0, 0.0
        self._speed = Speed()
        self._spent = 0.0
        self._last: float | None = None
        self._said = False

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Show the bar inside the `with` block."""
        with progress_bar("", 1) as self._step:
            yield

    @contextlib.contextmanager
    def job(self, description: str, reader: Reader, work: Work | None = None) -> Iterator[None]:
        """Count what the reader reads in the `with` block as the next job. work: if it is other than announced."""
        announced = self._later.pop(0)
        self._now, self._last = Counter(announced if work is None else work), None
        self._step(phase=description)
        with reader.watched(self._advance):
            yield
        self._now, self._batch = Counter(), 0.0

    def expect(self, *jobs: Work) -> None:
        """The jobs to come, instead of those announced."""
        self._later = [Counter(job) for job in jobs]

    def skip(self) -> None:
        """The next job needs no reading."""
        self._later.pop(0)

    def begin(self, length: int, tokens: float) -> None:
        """Call it before each batch, with the length of its passes and its tokens."""
        self._length, self._batch = length, tokens
        self._now[length] = max(0, self._now[length] - tokens)  # type: ignore[assignment]

    def _advance(self, tokens: float) -> None:
        now = time.monotonic()
        self._batch = max(0.0, self._batch - tokens)
        if self._last is not None:  # reading, without loading
            self._spent += now - self._last
            self._speed.add(self._length, tokens, now - self._last)
            work = sum([self._now, *self._later], Counter({self._length: self._batch}))  # type: ignore[dict-item]
            left = sum(tokens * self._speed.seconds_per_token(length) for length, tokens in work.items())
            self._step(done=self._spent / (self._spent + left) if left else 1, left=left)
            if not self._said and self._spent > _SECONDS_BEFORE_ESTIMATE and left > 3600:
                self._said = True
                say(f"Reading takes some {duration(left)} more.{self._advice}")
        self._last = now
