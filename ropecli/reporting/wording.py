"""Formats parts of reports as text: protocols, changes, numbers."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ropecli.evaluation.protocols import PASSAGE
from ropecli.evaluation.verdict import are_few
from ropecli.table import clean

if TYPE_CHECKING:
    from ropecli.evaluation.report import Change, Copies, Report


_HARDLY = 0.001
"""Share of the scored tokens."""
_ENOUGH_TOKENS = 10
"""Tokens of a class in a document."""
RECALL_NOTE = "recall 1: as good as a copy nearby; 0: no better than without the far text"


def task_name(report: "Report") -> str:
    if report.kind != "scores":
        return report.kind
    return "RULER" if report.task == "ruler" else clean(report.task, 40)


def measured_by(report: "Report") -> str:
    """The protocol of a perplexity with its settings, what recall repeats, or the way that answers were found."""
    if report.kind == "perplexity":
        given = {key: report.settings.get(key) for key in ("stride", "targets")}
        settings = [f"{key} {value}" for key, value in given.items() if value is not None]
        return clean(f"protocol {report.task}" + (f" ({', '.join(settings)})" if settings else ""), 130)
    if report.kind == "recall":
        passages, several = report.settings.get("passages_per_pass", 1), ""
        if passages > 1:
            several = (
                f", {passages} per pass, repeated at least {min(report.settings['least_distances']):,} tokens later"
            )
        return f"passages of {PASSAGE} tokens{several}" + ", copied greedily" * (report.mode == "generate")
    return "answers generated" if report.mode == "generate" else "answers ranked among candidates"


def sample_count(report: "Report") -> str:
    if report.kind != "scores":
        count, what = max(cell.samples for cell in report.cells), "document"
    else:
        count, what = sum(cell.samples for cell in report.cells), "prompt"
    return f"{count} {what}{'s'[: count != 1]}"


def change_words(change: "Change", unit: str = "", *, places: int | None = None, sign: str = "+") -> str:
    """A change with its interval: "+1.2% (0.3 to 2.0)". places: decimals of a change that is not one in percent."""

    def words(value: float, sign: str = "") -> str:
        if places is not None:
            return f"{value:{sign}.{places}f}"
        return f"{100 * value:{sign}.1f}" if abs(value) < 1e3 else f"{100 * value:{sign}.3g}"

    interval = ""
    if change.low is not None and change.high is not None:
        interval = f" ({words(change.low)} to {words(change.high)})"
    return f"{words(change.change, sign)}{unit}{interval}"


def recall_words(change: "Change") -> str:
    """A recall or far gain with its interval: "0.61 (0.56 to 0.67)"."""
    return change_words(change, places=2, sign="")


def reads_words(report: "Report") -> str:
    """How far recall reads."""
    reads, half = report.reads_to(), report.reads_to(0.5)
    if reads is None:
        return f"It does not read at {report.lengths[0]} tokens: far gain and recall are not certainly above 0."
    above = f"up to {half}" if half else "at no length"
    return f"It reads far text up to {reads} tokens, with recall above one half {above}."


def reference_sentence(report: "Report") -> str:
    """A sentence that says what a recall of 1 and of 0 means."""
    reference = report.reference
    assert reference is not None
    where = f"at {reference.near.length} tokens in {clean(reference.name)}"
    return f"Recall 1: as good as a near copy {where}. 0: no better than there without the passage."


def copies_sentences(copies: Sequence["Copies"], reference: int) -> list[str]:
    """The share of tokens with a far copy, and the gain on them. reference: tokens that the base reads."""
    by_name = {each.name: each for each in copies}
    ordinary, far = by_name.get("ordinary"), by_name.get("far")
    if far is None or far.share < _HARDLY:
        hardly = f"The text hardly repeats anything from more than {reference} tokens back."
        return [f"{hardly} References and topics are no copies."]
    holding = [count for count in far.tokens if count]
    unsure = far.gain.low is None or far.gain.high is None or far.gain.low <= 0 <= far.gain.high
    sentences = [
        f"{far.share:.1%} of the scored tokens follow four tokens that stood last more than {reference} tokens back, "
        f"in {len(holding)} of {len(far.tokens)} documents. Their loss is {far.loss:.2f} instead of "
        f"{far.base_loss:.2f}; gain: {recall_words(far.gain)} nats per token{', which is not certain' * unsure}"
        f"{f'; on ordinary tokens {recall_words(ordinary.gain)}' if ordinary else ''}."
    ]
    if are_few(enough := sum(count >= _ENOUGH_TOKENS for count in holding)):
        most, documents = max(holding) / sum(holding), "1 document has" if enough == 1 else f"{enough} documents have"
        sentences.append(f"Few: {documents} {_ENOUGH_TOKENS} such tokens or more, and one has {most:.0%} of them.")
    return sentences


def score_words(report: "Report", length: int) -> str:
    """Mean score at a length with Wilson's 95% interval: "58.3% (32 to 81)"."""
    low, high = (100 * end for end in report.interval(length))
    return f"{100 * report.mean(length)[0]:.1f}% ({low:.0f} to {high:.0f})"


def ruler_sentences(report: "Report") -> list[str]:
    """The effective length, and why the scores are not those of published tables."""
    shortest, longest, effective = report.lengths[0], report.lengths[-1], report.effective_length
    needed = f"{100 * report.threshold:.1f}% on average"
    if report.settings.get("threshold") is None:
        needed += f", 85.6% of the score at {shortest} tokens"
    length = f"{effective} tokens" if effective else f"below {shortest} tokens"
    if effective == longest:
        length = f"at least {longest} tokens, the longest length"
    reasons = ["the essay is the demo's text"] * (report.source == "demo")
    reasons += [*["answers were ranked"] * (report.mode == "rank"), f"{len(report.tasks)} of 13 tasks"]
    sentences = [f"Effective length: {length} (required: {needed})."]
    if not any(map(any, (cell.sums for cell in report.cells))):
        sentences = ["Effective length: none, because no answer was right."]
        sentences += ["For a base model, use --mode rank."] if report.mode == "generate" else []
    elif not report.above_chance():
        sentences = [
            f"Effective length: none, because the score at {shortest} tokens, {score_words(report, shortest)}, "
            f"is not above that of guessing, {100 * report.chance(shortest):.0f}%."
        ]
    if report.mode == "rank":
        sentences.append(f"Guessing scores {100 * report.chance(longest):.0f}% at {longest} tokens.")
    return [*sentences, f"Not comparable with published tables: {'; '.join(reasons)}."]


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
