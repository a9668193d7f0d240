"""What an extension cost inside the old window, and what it gained beyond: two numbers, each with its interval."""

from collections.abc import Sequence
from dataclasses import dataclass

from ropecli.evaluation.protocols import Protocol
from ropecli.evaluation.tally import Change, Row, Tokens, paired_change


@dataclass(frozen=True)
class Headline:
    """A change of perplexity against the baseline, paired by document: -0.07 is 7% lower.

    length: at which the model read; baseline_length: at which the baseline read the same target tokens.
    """

    name: str
    length: Tokens
    baseline_length: Tokens
    change: Change


def headlines(rows: Sequence[Row], baseline: Sequence[Row], protocol: Protocol, window: int) -> list[Headline]:
    """The short-context cost and the long-context gain.

    window: the baseline's own, tokens. The cost: both at the longest length inside it. The gain: the model at its
    longest length beyond it, against the baseline at the longest inside its window, where it works; that wants a
    protocol that scores the same tokens at every length. With the others the two can only be read at the same length,
    where the baseline does not work: a gain by another name. One that the lengths do not tell is left out.
    """
    ours, theirs = ({row.length: row for row in of} for of in (rows, baseline))
    inside = max((length for length in ours if length <= window), default=None)
    longest = max(ours)
    found = []
    if inside is not None:
        found.append(Headline("short-context cost", inside, inside, paired_change(ours[inside], theirs[inside])))
    if longest > window and not protocol.scores_the_same_tokens:
        change = paired_change(ours[longest], theirs[longest])
        found.append(Headline("change at the same length beyond the window", longest, longest, change))
    elif longest > window and inside is not None:
        found.append(Headline("long-context gain", longest, inside, paired_change(ours[longest], theirs[inside])))
    return found
