"""A device's memory that does not suffice, as a message."""

import contextlib
from collections.abc import Iterator

import torch

from ropecli.errors import RopecliError


@contextlib.contextmanager
def within_memory(what: str, remedy: str) -> Iterator[None]:
    """Raises RopecliError, a sentence about `what` and the `remedy`, where a device runs out of memory inside."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RopecliError(f"{what} does not fit into the device's memory. {remedy}") from error
