"""Calls a function once another library's module is loaded, without loading it: `import ropecli` costs nothing so.

Its finder and its loader do without the base classes of importlib.abc, whose import alone takes milliseconds.
"""

import importlib.machinery
import itertools
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def after_import(name: str, action: Callable[[], None]) -> None:
    """Calls `action` now where the module is loaded, else right after it is first loaded without an error."""
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _Waiting(name, action))


class _Waiting:
    """Leaves the finding to the finders after it, and wraps the loader that they name, until the module is loaded.

    It stays among the finders: another thread may be going through them.
    """

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self.name, self.action, self.done = name, action, False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name or self.done:
            return None
        later = list(itertools.dropwhile(lambda finder: finder is not self, sys.meta_path))[1:]
        specs = (finder.find_spec(fullname, path, target) for finder in later)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Telling(spec.loader, self)  # type: ignore[assignment]
        return spec


class _Telling:
    """Loads as `loader` does, tells of it, and is gone."""

    def __init__(self, loader: Any, waiting: _Waiting) -> None:
        self.loader, self.waiting = loader, waiting

    def __getattr__(self, name: str) -> Any:
        """What else is asked of a loader, as the source."""
        return getattr(self.loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        self.waiting.action()
        self.waiting.done = True
