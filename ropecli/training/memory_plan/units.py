"""Sizes of memory as people write them: 80GB is 80 × 10⁹ bytes, 80GiB is 80 × 2³⁰."""

import re

from ropecli.errors import RecipeError, shown

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGTP", 1)}
_UNITS |= {f"{letter}IB": 1024**power for power, letter in enumerate("KMGTP", 1)}


def read_bytes(text: str, name: str) -> int:
    """Raises RecipeError, which calls the value by `name`, for what is no size above zero."""
    found = re.fullmatch(r"\s*(\d{1,12}(?:\.\d{1,6})?)\s*([a-zA-Z]*)\s*", text)
    unit = _UNITS.get(found[2].upper()) if found else None
    size = round(float(found[1]) * unit) if found and unit else 0
    if size <= 0 or (found and not found[2]):
        raise RecipeError(f"{name} is {shown(text)}; a number with a unit was expected, as 80GB (10⁹ bytes) or 80GiB.")
    return size


def in_gb(size: float) -> str:
    """Bytes as people read them, in units of 10⁹, or 10⁶ below a tenth of that."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"
