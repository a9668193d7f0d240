"""Identities: the sha256 of values, and of files."""

import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import numpy as np

_PIECE = 2**18


def digest(*parts: object) -> str:
    """The sha256 of these values in order: bytes, arrays (integers as int64) and all else as canonical JSON.

    A value that JSON does not know counts by its repr, which must not contain an address or a shortened array.
    """
    sha = hashlib.sha256()
    for part in parts:
        shape: list[object] = []
        if isinstance(part, np.ndarray):
            array = part.astype("<i8" if part.dtype.kind in "iu" else part.dtype.newbyteorder("<"))
            shape, data = [array.dtype.str, *array.shape], array.tobytes()
        else:
            data = part if isinstance(part, bytes) else json.dumps(part, sort_keys=True, default=repr).encode()
        sha.update(json.dumps([*shape, isinstance(part, bytes), len(data)]).encode())
        sha.update(data)
    return sha.hexdigest()


def sha256_of(paths: Iterable[Path]) -> list[str]:
    """The sha256 of each file, each in a thread: reading and hashing release the GIL. Raises OSError."""
    stopped = Event()

    def read(path: Path) -> str:
        sha = hashlib.sha256()
        with path.open("rb") as file:
            while not stopped.is_set() and (piece := file.read(_PIECE)):
                sha.update(piece)
        return sha.hexdigest()

    with ThreadPoolExecutor() as threads:
        try:
            return list(threads.map(read, paths))
        finally:
            stopped.set()  # Ctrl-C does not wait for the rest of the files
