"""The lengths of a measurement: chosen once, for all of its models."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ropecli.evaluation.subject import Subject

_SHORTEST = 16


@dataclass(frozen=True)
class Lengths:
    """tokens: ascending. are_given: by the user, so that a task leaves none of them out."""

    tokens: tuple[int, ...]
    are_given: bool = True

    def that_fit(self, fits: Callable[[int], bool]) -> list[int]:
        """All that the user gave; else those that fit, or the longest one."""
        if self.are_given:
            return list(self.tokens)
        return list(filter(fits, self.tokens)) or [self.tokens[-1]]


def choose_lengths(given: Sequence[int] | None, subjects: Sequence[Subject]) -> Lengths:
    """The lengths that were given, or doubling from a quarter of the pretraining length to the context length.

    The baseline's context length does not count: it is compared at what the others read.
    """
    if given:
        return Lengths(tuple(sorted(set(given))))
    longest = max(subject.positions.context_length for subject in subjects if not subject.is_baseline)
    lengths = [max(_SHORTEST, min(subject.positions.pretraining_length for subject in subjects) // 4)]
    while 2 * lengths[-1] <= longest:
        lengths.append(2 * lengths[-1])
    return Lengths(tuple(lengths if lengths[-1] >= longest else [*lengths, longest]), are_given=False)
