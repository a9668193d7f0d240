"""Errors that the user can fix. The command line prints the message and exits with status 2.

RopecliError
├── CheckpointError   unusable checkpoint folder or config.json
├── MethodError       unknown method, or invalid parameter or factor
├── PatchError        the patch cannot be written
│   └── ProofError    the model loaded from the patch differs from the expected rotary tables
├── DataError         unusable data source
├── NotFiniteError    loss, gradient or weights are not finite
├── EndpointError     a server gives no usable answer
├── OutputError       output exists already, or cannot be written
└── RecipeError       invalid recipe, or a request that differs from the interrupted one; lists all faults
"""

import difflib
import shlex
from collections.abc import Iterable
from typing import Any


class RopecliError(Exception):
    """An error the user can fix. The message says what happened, the value, what was expected, and the next step."""


class CheckpointError(RopecliError): ...


class MethodError(RopecliError): ...


class PatchError(RopecliError): ...


class ProofError(PatchError): ...


class DataError(RopecliError): ...


class NotFiniteError(RopecliError): ...


class EndpointError(RopecliError): ...


class OutputError(RopecliError): ...


class RecipeError(RopecliError): ...


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence that suggests the closest known name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.65)
    return f" Did you mean {close[0]!r}?" if close else ""


def reason_of(error: BaseException) -> str:
    """The first line of a library's error message, or the error's class name if there is no message.

    Includes the next line if the first ends in a colon.
    """
    first, *rest = (line.strip() for line in str(error).strip().split("\n"))
    following = next(filter(None, rest), "") if first.endswith(":") else ""
    return f"{first} {following}".strip() or type(error).__name__


def quoted(*words: object) -> str:
    """Words of a command in a message, quoted for a shell."""
    return shlex.join(map(str, words))


def shortened(text: str, longest: int = 1000) -> str:
    """The text without its middle, if it is longer than this many characters. Names often differ only at the end."""
    half = (longest - 3) // 2
    return text if len(text) <= longest else f"{text[:half]}...{text[-half:]}"


def shown(value: object) -> str:
    """The value's repr for a message, at most 60 characters."""
    return shortened(repr(value), 60)


def first_fault(error: Any, root: str = "file") -> str:
    """The place and the message of the first fault of a pydantic ValidationError. root: name of what was read."""
    fault = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, fault['loc'])) or root}: {fault['msg']}"
