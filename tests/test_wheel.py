"""The wheel is complete: in an environment of its own, outside the repository, it does the main job."""

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path
from zipfile import ZipFile

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "scripts" / "constraints.txt"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, since building leaves files beside the sources."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("ropecli", "recipes"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    output = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps", "--wheel-dir", output, copy]
    build = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "Warning" not in build.stdout + build.stderr
    [built] = output.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, environment) -> Path:
    """The `ropecli` command of an environment with the wheel and its requirements."""
    needed = [one for one in requires("ropecli") or [] if "extra ==" not in one]
    python = environment("wheel", needed, "-c", CONSTRAINTS)
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", wheel]
    subprocess.run(install, check=True, stderr=subprocess.DEVNULL)
    return python.with_name("ropecli")


def test_every_file_is_in_the_wheel(wheel):
    files = {path.relative_to(ROOT) for name in ("ropecli", "recipes") for path in (ROOT / name).rglob("*.*")}
    expected = {
        str(path if path.parts[0] == "ropecli" else "ropecli" / path) for path in files if path.suffix != ".pyc"
    }
    assert expected <= set(ZipFile(wheel).namelist())


def test_a_package_index_shows_no_dead_links(wheel):
    [name] = [name for name in ZipFile(wheel).namelist() if name.endswith("METADATA")]
    text = ZipFile(wheel).read(name).decode()
    assert "ropecli extend" in text
    assert re.findall(r"\]\((?!https?://)[^)]*\)", text) == []


def test_the_main_job_without_a_home_outside_the_repository(installed, tmp_path):
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "XDG_CACHE_HOME")}
    environment = {**kept, "HOME": "/dev/null/home", "PATH": f"{installed.parent}:{os.environ['PATH']}"}
    job = shutil.copy(ROOT / "scripts" / "main_job", tmp_path)
    result = subprocess.run(["bash", job], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    configuration = Path(result.stdout.splitlines()[-1])
    assert configuration.is_file()
    assert configuration.is_relative_to(installed.parents[1])
