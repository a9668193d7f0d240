"""What is drawn of a Row: perplexity, or bits per byte, which may be compared between tokenizers."""

from collections.abc import Callable
from dataclasses import dataclass

from ropecli.errors import DataError, did_you_mean
from ropecli.evaluate.tally import Row
from ropecli.report.wording import number


@dataclass(frozen=True)
class Metric:
    """name: as on the command line. axis: with the unit. of: the value of a row, None where it has none.

    interval: the row's 95% interval, None where it has none. logarithmic: how its axis is drawn. shown: a value.
    """

    name: str
    axis: str
    of: Callable[[Row], float | None]
    interval: Callable[[Row], tuple[float, float] | None]
    logarithmic: bool
    shown: Callable[[float], str]


def _ppl_interval(row: Row) -> tuple[float, float] | None:
    return None if row.ppl_low is None or row.ppl_high is None else (row.ppl_low, row.ppl_high)


METRICS = {
    metric.name: metric
    for metric in (
        Metric("ppl", "perplexity (lower is better)", lambda row: row.ppl, _ppl_interval, True, number),
        # no interval: that of perplexity is over tokens, and a document's bytes are not kept
        Metric(
            "bits-per-byte",
            "bits per byte (lower is better)",
            lambda row: row.bits_per_byte,
            lambda row: None,
            False,
            lambda value: f"{value:.4f}",
        ),
    )
}


def get_metric(name: str) -> Metric:
    """Raises DataError for an unknown name."""
    if name not in METRICS:
        raise DataError(f"Unknown metric {name!r}. Known: {', '.join(METRICS)}.{did_you_mean(name, METRICS)}")
    return METRICS[name]
