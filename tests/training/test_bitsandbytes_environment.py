"""The tests of quantized weights in an environment of their own, which pytest's cache keeps.

They skip where bitsandbytes is installed already.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PINNED = ["bitsandbytes==0.50.2", "compressed-tensors==0.20.0", "loguru==0.7.3"]
ROOT = Path(__file__).parents[2]
TESTS = [Path(__file__).with_name("test_bitsandbytes.py"), ROOT / "tests" / "evaluation" / "test_quantized.py"]


@pytest.fixture(scope="module")
def python(environment) -> Path:
    if importlib.util.find_spec("bitsandbytes"):
        pytest.skip("bitsandbytes is here already")
    # what it needs besides is what ropecli needs, and is taken from this environment
    return environment("bitsandbytes", PINNED, "--no-deps")


def test_with_bitsandbytes(python):
    ours = [str(ROOT), *(path for path in sys.path if path)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(ours)}
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert "skipped" not in result.stdout
