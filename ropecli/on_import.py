"""Calls a function once another library's module is loaded, without loading it: `import ropecli` costs nothing so."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def after_import(name: str, action: Callable[[], None]) -> None:
    """Calls `action` now where the module is loaded, else right after it is first imported."""
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _Waiting(name, action))


class _Waiting(importlib.abc.MetaPathFinder):
    """Leaves the finding to the others, and wraps the loader that they name."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self.name, self.action = name, action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Telling(spec.loader, self.action)
        return spec


class _Telling(importlib.abc.Loader):
    """Loads as `loader` does, tells of it, and is gone."""

    def __init__(self, loader: importlib.abc.Loader, action: Callable[[], None]) -> None:
        self.loader, self.action = loader, action

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        self.action()
