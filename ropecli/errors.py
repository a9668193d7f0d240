"""What goes wrong, by whose hand. The command line turns each into one message and exit status 2.

RopecliError
├── CheckpointError   a folder or config.json that cannot be used as it is
├── MethodError       an unknown method, parameter or factor
├── PatchError        a patch that cannot be written as asked
│   └── ProofError    the written patch does not show in the live model
├── DataError         a data source that does not give what was asked of it
├── NotFiniteError    a loss or a gradient that is not finite
├── DivergedError     a training whose loss has left its best far behind
├── OutputError       an output that exists already, or that cannot be written
└── RecipeError       a recipe with faults, or a request that is not the one to be gone on with; all of them listed
"""

import difflib
from collections.abc import Iterable


class RopecliError(Exception):
    """Something the user can mend. Its message says what, the value, what was expected, and the next step."""


class CheckpointError(RopecliError): ...


class MethodError(RopecliError): ...


class PatchError(RopecliError): ...


class ProofError(PatchError): ...


class DataError(RopecliError): ...


class NotFiniteError(RopecliError): ...


class DivergedError(RopecliError): ...


class OutputError(RopecliError): ...


class RecipeError(RopecliError): ...


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known one, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.65)
    return f" Did you mean {close[0]!r}?" if close else ""


def reason_of(error: BaseException) -> str:
    """The first line of what a library below says went wrong, or the error's kind where it says nothing.

    One that ends in a colon goes on in the next.
    """
    first, *others = (line.strip() for line in str(error).strip().split("\n"))
    following = next(filter(None, others), "") if first.endswith(":") else ""
    return f"{first} {following}".strip() or type(error).__name__


def shown(value: object) -> str:
    """A value as a message shows it: at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
