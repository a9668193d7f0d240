"""What is asked of a config alone answers at once: neither torch nor transformers is loaded for it."""

import json
import os
import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "accelerate", "datasets", "huggingface_hub", "matplotlib", "peft", "jinja2"}

# Runs the statements of argv[1] with the command line argv[2:], then says which modules were loaded.
PROBE = """
import json, sys
statements, sys.argv = sys.argv[1], ["ropecli", *sys.argv[2:]]
try:
    exec(statements)
except SystemExit as stop:
    assert not stop.code, stop.code
print("\\nLOADED " + json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""
MAIN = "from ropecli.cli.app import main; main()"


@pytest.fixture
def loaded(tmp_path):
    """loaded(statements, *command line) -> the top-level modules that a fresh interpreter has loaded after it."""

    def call(statements: str, *arguments: object) -> set[str]:
        result = subprocess.run(
            [sys.executable, "-c", PROBE, statements, *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        )
        assert result.returncode == 0, result.stderr
        return set(json.loads(result.stdout.rpartition("LOADED ")[2]))

    return call


@pytest.mark.parametrize("module", ["ropecli", "ropecli.__main__", "ropecli.cli.app"])
def test_importing(module, loaded):
    modules = loaded(f"import {module}")
    assert module.partition(".")[0] in modules
    assert not modules & HEAVY


def test_importing_the_package_loads_none_of_its_parts(loaded):
    assert not loaded("import ropecli") & {"numpy", "typer", "rich", "yaml", *HEAVY}


def test_the_probe_sees_what_is_loaded(loaded):
    assert "accelerate" in loaded("import ropecli.cli.app, accelerate")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["patch", "--help"],
        ["inspect", "--help"],
        ["plot", "--help"],
        ["theory", "--help"],
        ["tune", "--help"],
    ],
)
def test_asking_for_help(arguments, loaded):
    assert not loaded(MAIN, *arguments) & HEAVY


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_inspecting(arguments, loaded, llama):
    assert not loaded(MAIN, "inspect", llama, *arguments) & HEAVY


@pytest.mark.parametrize("arguments", [[], ["--json"], ["-m", "yarn,ntk,rerope", "--factor", "8"]])
def test_the_theory_of_a_checkpoint(arguments, loaded):
    assert not loaded(MAIN, "theory", "demo", *arguments) & HEAVY


@pytest.mark.parametrize("arguments", [[], ["yarn"], ["--json"], ["yarn", "--json"]])
def test_listing_and_explaining_methods(arguments, loaded):
    assert not loaded(MAIN, "methods", *arguments) & HEAVY


def test_planning(loaded, llama):
    assert not loaded(MAIN, "patch", llama, "-m", "yarn", "--factor", 4, "--dry-run") & HEAVY


def test_patching_without_the_proof(loaded, llama, tmp_path):
    arguments = ["-m", "yarn", "--factor", 4, "--no-verify", "--output", tmp_path / "out"]
    assert not loaded(MAIN, "patch", llama, *arguments) & HEAVY
    assert (tmp_path / "out" / "config.json").is_file()


def test_the_mathematics_from_the_api(loaded):
    statements = """
import ropecli
rope = ropecli.RopeGeometry(128, 128, 5e5, 8192)
assert len(ropecli.scale(rope, ropecli.ScalingSpec("yarn", 4.0)).inv_freq) == 64
assert "yarn" in ropecli.scaling_methods()
"""
    assert not loaded(statements) & {"typer", "rich", *HEAVY}


def test_the_theory_from_the_api(loaded):
    statements = """
import ropecli
study = ropecli.make_study(ropecli.open_checkpoint("demo"), [ropecli.ScalingSpec("yarn", 8.0)])
summary = ropecli.summarize(study.ropes["yarn ×8"], study.target)
assert summary["target_length"] == 2048
assert ropecli.smallest_base(study.geometry, 2048) > study.geometry.rope_theta
"""
    assert not loaded(statements) & {"typer", "rich", *HEAVY}


def test_every_name_of_the_api_is_there():
    import ropecli

    assert set(ropecli.__all__) <= set(dir(ropecli))
    for name in ropecli.__all__:
        assert getattr(ropecli, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'patched'"):
        ropecli.patched  # noqa: B018
