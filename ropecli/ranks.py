"""The processes of a launch, as torchrun and `accelerate launch` name them in the environment.

Pods and node shells may set RANK for a single process, so RANK alone is no launch.
"""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Ranks:
    """rank, local_rank: of this process, among all and on its host. count, local_count: how many there are."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    local_count: int = 1


def read_ranks() -> Ranks:
    """The launch of this process: of one, unless RANK is set and WORLD_SIZE is above 1."""
    ranks = Ranks(
        _number("RANK", -1), _number("WORLD_SIZE", 1), _number("LOCAL_RANK", 0), _number("LOCAL_WORLD_SIZE", 1)
    )
    return ranks if ranks.rank >= 0 and ranks.count > 1 else Ranks()


def _number(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else default
