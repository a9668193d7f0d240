"""Several processes, started by `accelerate launch` or torchrun, that share one evaluation's documents."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

_T = TypeVar("_T")
_PATIENCE = timedelta(days=7)
"""A process that is done waits so long for the others: their documents may be longer."""


@dataclass(frozen=True)
class Workers:
    """rank: of this process, 0 for the first, which alone speaks and writes the result. count: how many there are."""

    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[_T]) -> list[_T]:
        """The part that is this process's."""
        return list(items[self.rank :: self.count])

    def gather(self, items: dict[int, Any]) -> dict[int, Any]:
        """The items of all processes, in each of them. They are passed on as they are: sums stay exact."""
        if self.count == 1:
            return items
        from torch import distributed

        found: list[Any] = [None] * self.count
        distributed.all_gather_object(found, items)
        return {key: value for part in found for key, value in part.items()}


def join_workers() -> Workers:
    """Meets the other processes of this launch, if there are any.

    By gloo on GPUs too: what they exchange are a few Python objects.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return Workers()
    from torch import distributed

    distributed.init_process_group("gloo", timeout=_PATIENCE)
    return Workers(distributed.get_rank(), distributed.get_world_size())
