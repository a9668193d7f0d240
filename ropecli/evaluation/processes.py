"""Share the documents of an evaluation among processes started by `accelerate launch` or torchrun."""

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import distributed

from ropecli.errors import RopecliError, reason_of
from ropecli.ranks import read_ranks

_PATIENCE = timedelta(days=7)
"""Timeout of a finished process that waits for the others."""
# How gloo and NCCL report a broken connection. gloo's internal errors ("[enforce fail at ...") do not match.
_BROKEN = re.compile(r"\[\S*gloo/transport/\S+\] (?P<gloo>[^\n]+?)(\. |\n|$)|(?P<nccl>ncclRemoteError[^\n]*)")


@dataclass(frozen=True)
class Workers:
    """rank: rank of this process; only rank 0 prints and writes results. count: number of processes."""

    rank: int = 0
    count: int = 1

    def gather(self, items: dict[Any, Any]) -> dict[Any, Any]:
        """Return the items of all processes, in each process."""
        if self.count == 1:
            return items
        meet()
        parts: list[Any] = [None] * self.count
        distributed.all_gather_object(parts, items)
        return {key: value for part in parts for key, value in part.items()}


ALONE = Workers()


def meet(group: Any = None) -> None:
    """Wait until all processes of a group, by default all of the launch, have called this. Signals are handled."""
    arrived = distributed.barrier(group, async_op=True)
    while not arrived.is_completed():  # a blocking wait would delay signals until the others are done
        time.sleep(0.05)
    arrived.wait()


def join_workers() -> Workers:
    """Join the other processes of this launch, if any. Uses gloo on GPUs too: few Python objects are exchanged."""
    if read_ranks().count == 1:
        return ALONE
    with among_processes("Start all processes again."):
        distributed.init_process_group("gloo", timeout=_PATIENCE)
    return Workers(distributed.get_rank(), distributed.get_world_size())


@contextlib.contextmanager
def among_processes(remedy: str) -> Iterator[None]:
    """Raise RopecliError if another process of this launch exits or does not respond. remedy: ends the message."""
    try:
        yield
    except RuntimeError as error:
        lost = isinstance(error, distributed.DistNetworkError | distributed.DistStoreError)
        broken = _BROKEN.search(str(error))
        if read_ranks().count == 1 or not (lost or broken):
            raise
        reason = reason_of(error).rstrip(".") if lost or not broken else broken["gloo"] or broken["nccl"]
        raise RopecliError(
            f"Another process of this run exited or does not respond: {reason}. Its output may show the cause. {remedy}"
        ) from error
