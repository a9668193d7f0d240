"""Files of JSON lines with checksums, which a run appends to and a resumed run reads.

    5b1c9e42 {"part": "model", "document": 0, ...}

A line that is damaged, or that a kill cut short, is skipped: its document is measured again. The first line, the
header, says which run the file belongs to, so a file with a damaged header is refused.
"""

import contextlib
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ropecli.errors import OutputError


def read_lines(path: Path, delete: Path | None = None) -> list[Any]:
    """The values of the sound lines, the header first; none where there is no whole line yet.

    delete: what the message says to delete; by default the file. Raises OutputError for a damaged header, and for a
    file that cannot be read.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise OutputError(f"{path} cannot be read: {error.strerror or error}.") from error
    if b"\n" not in content:
        return []  # cut short, or just being written by another process
    header, *values = map(_value, content.split(b"\n"))
    if header is None:
        raise _refusal(path, delete or path)
    return [header, *(value for value in values if value is not None)]


@contextlib.contextmanager
def appending(path: Path, header: Any) -> Iterator[Callable[[Any], None]]:
    """Gives a function that appends a value to the file, which begins with `header` where it is new.

    Raises OutputError for a file that is not of this run, and for what the disk refuses, from the function too.
    """

    def append(value: Any) -> None:
        with _writing(path):
            line = _line(value)
            while line:  # where a disk is almost full, a part is written, and the rest is refused
                line = line[file.write(line) :]

    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes() if path.exists() else b""
        if b"\n" not in content and not _line(header).startswith(content):
            raise _refusal(path, path)  # not ours, cut short
        # unbuffered: nothing is left for the closing, and a kill loses no whole line
        file = path.open("ab" if b"\n" in content else "wb", buffering=0)
    with file:
        if not file.tell():
            append(header)
        elif not content.endswith(b"\n"):
            with _writing(path):
                file.write(b"\n")  # so that a line that was cut short does not spoil the next
        yield append


def _refusal(path: Path, delete: Path) -> OutputError:
    return OutputError(
        f"Cannot resume from {path}: its first line is damaged, or an older version of ropecli wrote it. Delete "
        f"{delete} to start over."
    )


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"{path} could not be written: {error.strerror or error}") from error


def _line(value: Any) -> bytes:
    text = json.dumps(value).encode()
    return b"%08x %b\n" % (zlib.crc32(text), text)


def _value(line: bytes) -> Any:
    """None for a line that is not as it was written."""
    checksum, _, text = line.partition(b" ")
    return json.loads(text) if checksum == b"%08x" % zlib.crc32(text) else None
