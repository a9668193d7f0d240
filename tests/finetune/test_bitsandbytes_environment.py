"""test_bitsandbytes.py in an environment that has bitsandbytes, which pytest's cache keeps. Skips where it is here."""

import importlib.util
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PINNED = "bitsandbytes==0.50.2"
ROOT = Path(__file__).parents[2]
TESTS = Path(__file__).with_name("test_bitsandbytes.py")


@pytest.fixture(scope="module")
def python(request) -> Path:
    """The interpreter of an environment with it alone. Skips where it cannot be had, and says why."""
    if importlib.util.find_spec("bitsandbytes"):
        pytest.skip("bitsandbytes is here already")
    home = Path(request.config.cache.mkdir("bitsandbytes"))
    found = home / "venv" / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    ready = home / "ready"
    if not ready.is_file() or ready.read_text() != PINNED:
        venv.create(home / "venv", with_pip=True, clear=True)
        # what it needs besides is what ropecli needs, and is taken from this environment
        result = subprocess.run(
            [found, "-m", "pip", "install", "--quiet", "--no-deps", PINNED], capture_output=True, text=True
        )
        if result.returncode:
            pytest.skip(f"{PINNED} cannot be had here: {result.stderr.strip()[-800:]}")
        ready.write_text(PINNED)
    return found


def test_with_bitsandbytes(python):
    ours = [str(ROOT), *(path for path in sys.path if path)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(ours)}
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", TESTS]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert "skipped" not in result.stdout
