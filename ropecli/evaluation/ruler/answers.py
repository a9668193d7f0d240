"""Scores of answers as RULER gives them, and the effective context length."""

import re
from collections.abc import Mapping, Sequence

PUBLISHED = 0.856
"""RULER's threshold: the score of Llama-2-7B at 4,096 tokens over thirteen tasks (arXiv:2404.06654, section 4)."""
_CONTROL = re.compile(r"[\x00-\x1f]")


def score_of(answer: str, references: Sequence[str], *, any_of: bool = False) -> float:
    """Share of the references that appear in the answer, ignoring case. any_of: 1 if any of them does."""
    text = _CONTROL.sub("\n", answer.strip()).strip().lower()
    hits = [reference.lower() in text for reference in references]
    return float(any(hits)) if any_of else sum(hits) / len(hits)


def effective_length(means: Mapping[int, float], threshold: float) -> int | None:
    """The longest length up to which every mean score is at or above the threshold; None if there is none."""
    longest = None
    for length in sorted(means):
        if means[length] < threshold:
            break
        longest = length
    return longest
