"""What is drawn of a Row: perplexity, or bits per byte, which may be compared between tokenizers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

from ropecli.errors import DataError, did_you_mean
from ropecli.evaluation.tally import Row
from ropecli.reporting.wording import number

AS_GOOD = 1 + 1e-5
"""float32 tells no smaller differences."""
_MORE_PLACES = 2


@dataclass(frozen=True)
class Metric:
    """name: as on the command line. axis: with the unit. of: the value of a row, None where it has none.

    interval: the row's 95% interval, None where it has none. logarithmic: how its axis is drawn. places: after the
    point.
    """

    name: str
    axis: str
    of: Callable[[Row], float | None]
    interval: Callable[[Row], tuple[float, float] | None]
    logarithmic: bool
    places: int

    @property
    def axis_label(self) -> str:
        return self.axis + (", logarithmic" if self.logarithmic else "")

    def shown_among(self, values: Iterable[float | None]) -> Callable[[float], str]:
        """Formats a value with so many places, and up to two more where different values would else look the same."""
        known = sorted(value for value in values if value is not None)
        for places in range(self.places, self.places + _MORE_PLACES + 1):
            if not any(
                number(low, places) == number(high, places) for low, high in pairwise(known) if high > low * AS_GOOD
            ):
                break
        return lambda value: number(value, places)


def _ppl_interval(row: Row) -> tuple[float, float] | None:
    return None if row.ppl_low is None or row.ppl_high is None else (row.ppl_low, row.ppl_high)


PPL = Metric("ppl", "perplexity (lower is better)", lambda row: row.ppl, _ppl_interval, True, 2)
# no interval: that of perplexity is over tokens, and a document's bytes are not kept
BITS_PER_BYTE = Metric(
    "bits-per-byte", "bits per byte (lower is better)", lambda row: row.bits_per_byte, lambda row: None, False, 4
)
METRICS = {metric.name: metric for metric in (PPL, BITS_PER_BYTE)}


def get_metric(name: str) -> Metric:
    """Raises DataError for an unknown name."""
    if name not in METRICS:
        raise DataError(f"Unknown metric {name!r}. Known: {', '.join(METRICS)}.{did_you_mean(name, METRICS)}")
    return METRICS[name]
