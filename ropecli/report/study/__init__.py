"""The kinds of plot that are computed of a checkpoint's frequencies, not of reports: a module each, named as the kind.

Each has figure(study), for a file, and chart(study), for the terminal, of the same data.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ropecli.checkpoint.study import Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

_ABF = {"abf": {"beta": 50.0}}
DEFAULT_METHODS: dict[str, dict[str, dict[str, Any]]] = {
    "wavelengths": {"linear": {}, "ntk": {}, "yarn": {}, "llama3": {}},
    "decay": {},
    "helix": {"linear": {}, **_ABF},
    "frequencies": {"linear": {}, **_ABF, "ntk": {}, "yarn": {}, "llama3": {}, "p-rope": {}},
    "tradeoff": {"linear": {}, **_ABF, "ntk": {}, "ntk-by-parts": {}, "llama3": {}, "p-rope": {}, "nope": {}},
}
"""What each kind shows beside the checkpoint as it is, unless asked for others: methods and their parameters.

tradeoff has ntk-by-parts for yarn: their images differ in length alone.
"""
STUDY_KINDS = tuple(DEFAULT_METHODS)


def study_figure(kind: str, study: Study) -> "Figure":
    return _module(kind).figure(study)


def study_chart(kind: str, study: Study) -> "RenderableType":
    return _module(kind).chart(study)


def _module(kind: str) -> Any:
    return importlib.import_module(f"{__name__}.{kind}")
