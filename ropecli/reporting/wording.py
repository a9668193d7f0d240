"""Formats parts of reports as text: protocols, changes, times, sizes."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ropecli.evaluation.protocol_descriptions import YARN_NOTE
from ropecli.evaluation.statistics import wilson
from ropecli.table import clean

if TYPE_CHECKING:
    from ropecli.evaluation.report import EvalReport, Headline, RulerReport


def protocol_name(report: "EvalReport") -> str:
    """The protocol with its settings, and the warning for `yarn`."""
    own = [f"{key} {report.settings[key]}" for key in ("stride", "targets") if report.settings.get(key) is not None]
    if report.protocol == "yarn":
        own.append(YARN_NOTE)
    return clean(report.protocol + (f" ({', '.join(own)})" if own else ""), 120)


HEADLINES_NOTE = "Percentages: change of perplexity, negative is better. In brackets: 95% interval, paired by document."


def headline_sentence(headline: "Headline") -> str:
    """A change of perplexity, like "short-context cost: +1.2% (0.3 to 2.0) at 256 tokens"; negative is lower."""
    change = headline.change
    interval = f" ({_percent(change.low)} to {_percent(change.high)})" if change.low is not None else ""
    if headline.length == headline.baseline_length:
        where = f" at {headline.length} tokens"
    else:
        where = f": {headline.length} tokens against the baseline's {headline.baseline_length}"
    return f"{clean(headline.name)}: {_percent(change.change, sign='+')}%{interval}{where}"


def ruler_mode(report: "RulerReport") -> str:
    return "answers generated" if report.mode == "generate" else "answers ranked among candidates"


def ruler_sentences(report: "RulerReport") -> list[str]:
    """The effective length, and why the scores are not those of published tables."""
    needed = f"{100 * report.threshold:.1f}% on average"
    if report.relative:
        needed += f", 85.6% of the score at {report.lengths[0]} tokens"
    found = f"{report.effective_length} tokens" if report.effective_length else f"below {report.lengths[0]} tokens"
    if report.effective_length == report.lengths[-1]:
        found = f"at least {report.effective_length} tokens, the longest length"
    reasons = [
        *(["the essay is the demo's text"] if report.source == "demo" else []),
        *(["answers were ranked"] if report.mode == "rank" else []),
        *([f"{len(report.tasks)} of 13 tasks"] if len(report.tasks) < 13 else []),
    ]
    sentences = [f"Effective length: {found} (required: {needed})."]
    if not any(map(any, (cell.scores for cell in report.cells))):
        sentences = ["Effective length: none, because no answer was right."]
        sentences += ["For a base model, use --mode rank."] if report.mode == "generate" else []
    elif not report.above_chance():
        shortest = report.lengths[0]
        mean, samples = report.mean(shortest)
        low, high = wilson(mean * samples, samples)
        sentences = [
            f"Effective length: none, because the score at {shortest} tokens, {100 * mean:.1f}% ({100 * low:.0f} to "
            f"{100 * high:.0f}), is not above that of guessing, {100 * report.chance(shortest):.0f}%."
        ]
    if report.mode == "rank":
        longest = report.lengths[-1]
        sentences.append(f"Guessing scores {100 * report.chance(longest):.0f}% at {longest} tokens.")
    if reasons:
        sentences.append(f"Not comparable with published tables: {'; '.join(reasons)}.")
    return sentences


def _percent(share: float | None, sign: str = "") -> str:
    percent = 100 * (math.nan if share is None else share)
    return f"{percent:{sign}.1f}" if abs(percent) < 1e5 else f"{percent:{sign}.3g}"


def number(value: float, places: int = 2) -> str:
    """Format a perplexity: `places` decimals, scientific notation from a million on."""
    return f"{value:.{places}f}" if abs(value) < 1e6 else f"{value:.3g}"


def tokens(value: float | None) -> str:
    """Format a length in tokens, as an integer from 10,000 on; empty for None and NaN."""
    if value is None or math.isnan(value):
        return ""
    if math.isinf(value):
        return "infinite"
    if value >= 1e15:
        return f"{value:.3g}"
    return f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"


def distinct(values: Sequence[float], digits: int = 6) -> list[str]:
    """Format numbers with at least `digits` significant digits, and more if distinct values would look equal."""
    while len({f"{value:.{digits}g}" for value in values}) < len(set(values)) and digits < 17:
        digits += 1
    return [f"{value:.{digits}g}" for value in values]


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def size(count: int) -> str:
    """Format bytes as KiB, MiB or GiB."""
    if count < 2**20:
        return f"{count / 2**10:.1f} KiB"
    return f"{count / 2**20:.0f} MiB" if count < 2**30 else f"{count / 2**30:.1f} GiB"
