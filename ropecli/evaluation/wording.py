"""Formats changes and numbers as text."""

import math
from collections.abc import Sequence

from ropecli.evaluation.report import Change, Copies
from ropecli.evaluation.verdict import are_few

_HARDLY = 0.001
"""Share of the scored tokens."""
_ENOUGH_TOKENS = 10
"""Tokens of a class in a document."""
RECALL_NOTE = "recall 1: as good as a copy nearby; 0: no better than without the far text"


def change_words(change: Change, unit: str = "", *, places: int | None = None, sign: str = "+") -> str:
    """A change with its interval: "+1.2% (0.3 to 2.0)". places: decimals of a change that is not one in percent."""

    def words(value: float, sign: str = "") -> str:
        if places is not None:
            return f"{value:{sign}.{places}f}"
        return f"{100 * value:{sign}.1f}" if abs(value) < 1e3 else f"{100 * value:{sign}.3g}"

    interval = ""
    if change.low is not None and change.high is not None:
        interval = f" ({words(change.low)} to {words(change.high)})"
    return f"{words(change.change, sign)}{unit}{interval}"


def recall_words(change: Change) -> str:
    """A recall or far gain with its interval: "0.61 (0.56 to 0.67)"."""
    return change_words(change, places=2, sign="")


def copies_sentences(copies: Sequence[Copies], reference: int) -> list[str]:
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


def number(value: float, places: int = 2) -> str:
    """Format a perplexity: `places` decimals, scientific notation from a million on."""
    return f"{value:.{places}f}" if abs(value) < 1e6 else f"{value:.3g}"


def tokens(value: float | None) -> str:
    """Format a length in tokens, as an integer from 10,000 on; empty for None and NaN."""
    if value is None or math.isnan(value):
        return ""
    if math.isinf(value):
        return "infinite"
    return f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"
