"""The wheel is complete: in an environment of its own, outside the repository, it does the main job."""

import json
import os
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
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", output, copy]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
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
        str(path if path.parts[0] == "ropecli" else "ropecli" / path)
        for path in files
        if path.suffix not in (".md", ".pyc")
    }
    assert expected <= set(ZipFile(wheel).namelist())


def test_the_main_job_outside_the_repository(installed, tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def ropecli(*arguments: object) -> str:
        command = [installed, *map(str, arguments)]
        result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert result.returncode == 0, result.stderr
        return result.stdout

    ropecli("patch", "demo", "--method", "yarn", "--factor", 4, "--output", "patched")
    settings = ("--length", 512, "--set", "gradient_accumulation=1", "--set", "warmup_steps=0")
    ropecli("finetune", "patched", "--recipe", "demo", "--steps", 2, *settings, "--output", "tuned")
    measured = ("eval-ppl", "tuned", "--data", "demo", "--lengths", 512, "--max-documents", 2, "--json")
    [row] = json.loads(ropecli(*measured))["reports"][0]["rows"]
    assert 1 < row["ppl"] < 50
    configuration = Path(ropecli("recipe", "--path", "8-gpu-fsdp2").strip())
    assert configuration.is_file()
    assert not configuration.is_relative_to(ROOT)
    assert "$ref" in json.loads(ropecli("recipe", "--schema"))["properties"]["stages"]["items"]
