"""What is asked of a config alone answers at once: neither torch nor transformers is loaded for it."""

import json
import os
import subprocess
import sys

import pytest
import scripts_by_path

HEAVY = {"torch", "transformers", "accelerate", "datasets", "huggingface_hub", "matplotlib", "peft", "jinja2"}

# Runs the statements of argv[1], which may take command lines from argv[2], and prints which modules are loaded then.
PROBE = """
import json, sys
lines = json.loads(sys.argv[2])
exec(sys.argv[1])
print("\\nLOADED " + json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""
# Commands one after the other in one interpreter, up to the first that loads a model library.
COMMANDS = f"""
from ropecli.cli.app import main
for line in lines:
    sys.argv = ["ropecli", *line]
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, line
    assert not {HEAVY} & set(sys.modules), line
"""


@pytest.fixture
def loaded(tmp_path):
    """loaded(statements, *command lines) -> the top-level modules that a fresh interpreter has loaded after them."""

    def call(statements: str, *lines: list[object]) -> set[str]:
        result = subprocess.run(
            [sys.executable, "-c", PROBE, statements, json.dumps(lines, default=str)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        )
        assert result.returncode == 0, result.stderr
        return set(json.loads(result.stdout.rpartition("LOADED ")[2]))

    return call


def test_importing_the_package_loads_none_of_its_parts(loaded):
    assert not loaded("import ropecli") & {"numpy", "typer", "rich", "yaml", *HEAVY}


def test_commands_that_ask_of_a_config_alone(loaded, llama, tmp_path):
    helped = ("patch", "inspect", "theory")
    patch = ["patch", llama, "--method", "yarn", "--factor", 4]
    assert not HEAVY & loaded(
        COMMANDS,
        ["--help"],
        ["--version"],
        *([name, "--help"] for name in helped),
        ["inspect", llama],
        ["inspect", llama, "--json"],
        ["theory", "demo"],
        ["theory", "demo", "--json"],
        ["theory", "demo", "--methods", "yarn,ntk,rerope", "--factor", "8"],
        ["methods"],
        ["methods", "yarn"],
        ["methods", "yarn", "--json"],
        [*patch, "--dry-run", "--no-verify"],
        [*patch, "--no-verify", "--output", tmp_path / "out"],
    )
    assert (tmp_path / "out" / "config.json").is_file()


def test_reports_are_drawn_without_a_model_library(loaded, tmp_path):
    """These commands load matplotlib and jinja2."""
    reports = scripts_by_path.SCRIPTS / "real_model_parts" / "reports"
    names = loaded(
        COMMANDS.partition("    assert not {")[0],
        ["export", "demo", "--engine", "vllm"],
        ["theory", "demo", "--methods", "yarn", "--factor", "8", "--plot", tmp_path / "plot.png"],
        ["report", *sorted(reports.glob("*.json")), "--output", tmp_path / "page.html"],
    )
    assert (tmp_path / "page.html").is_file()
    assert not names & {"torch", "transformers", "accelerate", "datasets", "peft"}


def test_commands_are_functions_in_any_order(fork, tmp_path):
    """No function is hidden by a package or a module of its name, whatever was imported before it."""
    statements = f"""
import sys
assert "ropecli" not in sys.modules
import ropecli.commands.plan, ropecli.reporting.page, ropecli
assert ropecli.inspect("demo").states[0].positions.context_length == 256
done = ropecli.patch("demo", method="yarn", factor=4, output={str(tmp_path / "out")!r}, no_verify=True)
assert ropecli.read_state(done.plan.source).positions.context_length == 256
[report] = ropecli.eval_ppl({str(tmp_path / "out")!r}, data="demo", lengths=64, max_documents=2).reports
assert report.cells[0].length == 64 and report.command == []
assert ropecli.export("demo", engine="vllm").command.startswith("vllm serve")
assert ropecli.patch("demo", method="ntk", factor=2, dry_run=True).output is None
assert ropecli.plan("demo", length=512).report["length"] == 512
assert all(callable(getattr(ropecli, name)) for name in ropecli.COMMANDS)
"""
    process = fork(exec, statements, {})
    assert process.wait() == 0, process.communicate()


def test_every_name_of_the_api_is_there():
    import ropecli

    assert set(ropecli.__all__) <= set(dir(ropecli))
    for name in ropecli.__all__:
        assert getattr(ropecli, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'patched'"):
        ropecli.patched  # noqa: B018


@pytest.mark.parametrize("name", sorted(path.stem for path in scripts_by_path.SCRIPTS.glob("*.py")))
def test_every_script_imports_what_is_there(name):
    scripts_by_path.load(name)


CHECKED = ["torch", "transformers", "numpy", "pydantic", "rich", "yaml", "huggingface_hub", "matplotlib"]
REFUSED = {
    "no checkpoint": ["inspect y5", "theory y5", "plan y5", "extend y5 --length 1k --output out", "export y5 -e vllm",
                      "patch y5 --method yarn --factor 4 -o out", "revert y5 -o out", "merge y5 -o out",
                      "push y5 --repo a/b", "eval-ppl y5 --data demo", "compare demo --baseline y5 --data demo",
                      "needle y5", "ruler y5", "check-served http://x --checkpoint y5",
                      "finetune y5 --data demo-train -o out"],
    "no method": ["methods yran", "patch demo --method yran --factor 4 -o out", "theory demo --methods yran",
                  "eval-ppl demo --data demo --methods yran", "compare demo --data demo --methods yarn,foo",
                  "needle demo --methods yarn+foo", "ruler demo --methods yran"],
    "no data": ["eval-ppl demo --data nowhere", "compare demo --data nowhere", "needle demo --data nowhere",
                "ruler demo --data nowhere", "extend demo --length 1k --data nowhere -o out",
                "finetune demo --data nowhere -o out", "check-served http://x -c demo --data nowhere"],
    "training data": ["finetune demo -o out", "finetune demo --recipe yarn-12k -o out"],
    "choice": ["export demo --engine vlm", "eval-ppl demo --data demo --protocol tial", "ruler demo --tasks niah",
               "needle demo --style poem", "needle demo --mode rnak"],
    "number": ["patch demo --method yarn --factor four -o out", "eval-ppl demo --data demo --lengths 1q",
               "needle demo --samples 0", "plan demo --length 1q", "extend demo --length 1 -o out"],
    "usage": ["eval-ppl demo", "eval-ppl demo --data demo --dat x", "patch demo -o out", "evalppl", "recipe yarn-12k",
              "patch demo --method yarn -o out", "needle demo --targets 3", "finetune"],
}  # fmt: skip


def test_wrong_arguments_are_refused_before_anything_heavy_is_imported(loaded, tmp_path):
    refusing = COMMANDS.replace("assert not stop.code", "assert stop.code == 2").replace(str(HEAVY), str({*CHECKED}))
    loaded(refusing, *(line.split() for lines in REFUSED.values() for line in lines))
