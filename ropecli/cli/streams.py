"""Keeps a command running when standard output or error cannot be written: full disk, closed pipe, no UTF-8."""

import codecs
import contextlib
import io
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from ropecli.errors import OutputError

_ASCII = {"×": "x", "±": "+/-", "–": "-", "…": "...", "→": "->", "−": "-", "÷": "/", "≠": "!="}
"""For signs that the terminal's encoding does not have; others become a question mark."""


def _as_ascii(error: UnicodeError) -> tuple[str, int]:
    """Return the replacement, and the position after it. See codecs.register_error."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(_ASCII.get(letter, "?") for letter in error.object[error.start : error.end]), error.end


codecs.register_error("ropecli-ascii", _as_ascii)


class _Stream(io.FileIO):
    """Standard output or error that never raises: what cannot be written goes to `instead`, or is dropped.

    fault: the reason; empty for a closed pipe, as in `| head -1`.
    """

    def __init__(self, number: int, instead: TextIO | None = None) -> None:
        super().__init__(number, "w", closefd=False)
        self._instead = instead
        self.fault = ""

    def write(self, data: Any, /) -> int:
        if not self.fault:
            try:
                return super().write(data)
            except BrokenPipeError:
                return len(data)
            except OSError as error:
                self.fault = error.strerror or str(error)
        if self._instead:
            self._instead.buffer.write(data)
            self._instead.flush()
        return len(data)


@contextlib.contextmanager
def safe_streams() -> Iterator[None]:
    """Redirect to standard error what standard output does not take; ignore failures of standard error.

    Raises OutputError at the end of the command if standard output could not be written.
    """
    sys.stderr, _ = _safe(sys.stderr, sys.__stderr__)
    sys.stdout, output = _safe(sys.stdout, sys.__stdout__, sys.stderr)
    try:
        yield
    except SystemExit as stop:
        if output and not stop.code:
            sys.stdout.flush()
            if output.fault:
                raise OutputError(
                    f"Cannot write standard output: {output.fault}. The missing part is printed above."
                ) from None
        raise


def _safe(stream: TextIO, own: TextIO | None, instead: TextIO | None = None) -> tuple[TextIO, _Stream | None]:
    """Leaves alone a stream that is not the process's own, as in tests."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream, None
    stream.reconfigure(errors="ropecli-ascii")
    if stream is not own:
        return stream, None
    raw = _Stream(stream.fileno(), instead)
    by_line = stream.line_buffering or stream.write_through
    return io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=by_line), raw
