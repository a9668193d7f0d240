"""Hashes files in threads."""

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

_PIECE = 2**18


def sha256_of(paths: Iterable[Path]) -> list[str]:
    """The sha256 of each file, each in a thread: reading and hashing release the GIL. Raises OSError."""
    stopped = Event()

    def digest(path: Path) -> str:
        sha = hashlib.sha256()
        with path.open("rb") as file:
            while not stopped.is_set() and (piece := file.read(_PIECE)):
                sha.update(piece)
        return sha.hexdigest()

    with ThreadPoolExecutor() as threads:
        try:
            return list(threads.map(digest, paths))
        finally:
            stopped.set()  # Ctrl-C does not wait for the rest of the files
