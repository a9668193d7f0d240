"""The commands: one function each, with the command's name and options, callable from Python as `ropecli.NAME`.

They import model libraries when they run. Names, types, defaults and help of the command line come from their
signatures.
"""

import importlib
from collections.abc import Callable
from typing import Any

_MEASURE = ("compare", "eval_ppl", "needle", "ruler")
COMMANDS = (
    *("check_served", "env", "export", "extend", "finetune", "inspect", *_MEASURE, "merge", "methods", "patch", "plan"),
    *("push", "recipe", "report", "revert", "theory"),
)


def find_command(name: str) -> Callable[..., Any]:
    """The function of this name, eval_ppl or eval-ppl. Imports its module."""
    name = name.replace("-", "_")
    module = importlib.import_module(f"{__name__}.{'measure' if name in _MEASURE else name}")
    function: Callable[..., Any] = getattr(module, name)
    return function
