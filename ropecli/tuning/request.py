"""What can be said against a tuning before a model library is loaded: its level, its methods, its factor, its data."""

from collections.abc import Sequence

from ropecli.data.sources import DEMO, read_texts
from ropecli.errors import DataError, MethodError, did_you_mean
from ropecli.scaling.method import ScalingMethod
from ropecli.scaling.registry import find_method
from ropecli.scaling.spec import check_factor
from ropecli.tuning.record import LEVELS


def refuse_request(level: str, methods: Sequence[str], factor: float, source: str) -> None:
    """Raises MethodError and DataError."""
    refuse_unknown_level(level)
    if not methods:
        raise MethodError("--methods names no method; `ropecli methods` shows them all.")
    for method in methods:
        tunable(method)
    check_factor(factor)
    refuse_held_out(source)
    read_texts(source)  # nothing is read yet: that it is there is enough


def refuse_unknown_level(level: str) -> None:
    if level not in LEVELS:
        raise MethodError(f"--level is {level!r}; it must be one of {', '.join(LEVELS)}.{did_you_mean(level, LEVELS)}")


def tunable(method: str) -> ScalingMethod:
    """Raises MethodError for an unknown one, and for one whose constants are no matter of one table of frequencies."""
    known = find_method(method)
    if known.remaps or known.depends_on_length:
        raise MethodError(
            f"{method} cannot be tuned: only methods that give one table of frequencies can, as yarn, ntk, abf or "
            "llama3."
        )
    return known


def refuse_held_out(source: str) -> None:
    if source == DEMO:
        raise DataError("'demo' is the held-out text that eval-ppl measures on; calibrate on 'demo-train'.")
