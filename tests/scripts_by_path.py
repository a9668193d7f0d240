"""The files of scripts/, which is no package, as modules."""

import importlib.util
import sys
from pathlib import Path
from typing import Any
from unittest import mock

SCRIPTS = Path(__file__).parents[1] / "scripts"


def load(name: str) -> Any:
    """name: coverage, bench_parts/plan, ..."""
    spec = importlib.util.spec_from_file_location(f"scripts_{name}", SCRIPTS / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    with mock.patch.object(sys, "path", [*sys.path, str(SCRIPTS)]):
        spec.loader.exec_module(module)
    return module
