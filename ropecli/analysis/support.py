"""How long a context a rope supports by the bound of Men et al. 2024, and which base would support it (base_bound)."""

from typing import NamedTuple

from ropecli.analysis.base_bound import smallest_base
from ropecli.analysis.distances import largest_distance
from ropecli.analysis.score import first_negative
from ropecli.scaling.spec import ScaledRope


class Support(NamedTuple):
    """needed: the largest distance asked for, tokens. supported: the largest before the first negative score, None
    where there is none as far as is looked. smallest_base: of `needed`, infinite where no base would do; None where it
    was not worked out.
    """

    needed: int
    supported: int | None
    smallest_base: float | None

    @property
    def falls_short(self) -> bool:
        return self.supported is not None and self.supported < self.needed


def support_of(rope: ScaledRope, target: int, longest: int, *, always: bool = False) -> Support:
    """Of a rope that is to read `target` tokens.

    longest: tokens up to which the smallest base is worked out; where the rope has no need of it, only if `always`.
    """
    needed = target if rope.remapping is None else largest_distance(rope, target)
    negative = first_negative(rope.inv_freq)
    found = Support(needed, None if negative is None else negative - 1, None)
    if needed <= longest and (always or found.falls_short):
        return found._replace(smallest_base=smallest_base(rope.geometry, needed))
    return found
