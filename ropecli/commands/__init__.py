"""The commands: one function each, with the command's name and options, callable from Python as `ropecli.NAME`.

They import model libraries when they run. Names, types, defaults and help of the command line come from their
signatures.
"""

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

_MEASURE = ("compare", "eval_ppl", "needle", "ruler")
COMMANDS = (
    *("check_served", "env", "export", "extend", "finetune", "inspect", *_MEASURE, "merge", "methods", "patch", "plan"),
    *("push", "recipe", "report", "revert", "theory"),
)


def find_command(name: str) -> Callable[..., Any]:
    """The function of this name, eval_ppl or eval-ppl. Imports its module, which has the same name."""
    name = name.replace("-", "_")
    function: Callable[..., Any] = getattr(importlib.import_module(f"{__name__}.{_module_of(name)}"), name)
    return function


def summary_of(name: str) -> str:
    """The first line of the command's docstring, without importing its module."""
    name = name.replace("-", "_")
    text = (Path(__file__).parent / f"{_module_of(name)}.py").read_text(encoding="utf-8")
    found = re.search(rf'^def {name}\(.*?"""(.*?)(?:\n|""")', text, re.MULTILINE | re.DOTALL)
    return found[1] if found else ""


def _module_of(name: str) -> str:
    return "measure" if name in _MEASURE else name
