"""What all commands share: aliases, suffixes, verbosity, progress without a terminal; and `ropecli recipe`."""

import re
from pathlib import Path

import pytest
import typer

from ropecli.cli import terminal
from ropecli.cli.app import _COMMANDS, app
from ropecli.cli.typer_command import ALIASES
from ropecli.evaluation.processes import Workers
from ropecli.training.recipe_schema import Recipe

RECIPES = Path(__file__).parents[2] / "recipes"
GROUP = typer.main.get_command(app)
COMMANDS = {name: GROUP.get_command(None, name) for name in GROUP.list_commands(None)}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_the_common_options_and_a_short_help(name, ropecli):
    outcome = ropecli(name, "-h")
    assert outcome.code == 0
    for option in ("--json", "--quiet", "-q", "--verbose", "-v"):
        assert option in outcome.out
    hidden = {alias for aliases in ALIASES.values() for alias in aliases}
    hidden -= {option for parameter in COMMANDS[name].params for option in parameter.opts}
    assert not hidden & set(outcome.out.split())


def test_guide_and_environment_are_printed(ropecli, monkeypatch, tmp_path):
    import torch

    guide = ropecli("--guide").succeeds().out
    assert all(f"  ropecli {name}" in guide for name in COMMANDS)
    assert "--resume" in guide
    assert guide.strip() in (Path(__file__).parents[2] / ".github" / "llms.txt").read_text(encoding="utf-8")
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "shard").write_bytes(bytes(2_000))
    monkeypatch.setenv("ROPECLI_CACHE", str(tmp_path))
    printed = ropecli("env", "--json").json()
    assert printed["torch"] == torch.__version__
    assert printed["cache"].startswith(f"{tmp_path}/tokens, 2.0 kB, ")
    assert printed["cache"].endswith(f"rm -r {tmp_path}/tokens")


@pytest.mark.parametrize(
    ("command", "arguments", "canonical"),
    [
        ("eval-ppl", "-d x --limit 3 --attn-implementation sdpa", "max_documents attn"),
        ("finetune", "--output-dir x --max-steps 3 --max-length 4k --config r.yaml", "output steps length recipe"),
        ("finetune", "-o x --per-device-train-batch-size 2 --report-to none", "batch_size tracker"),
        ("finetune", "-o x --gradient-accumulation-steps 2", "gradient_accumulation"),
        ("patch", "--method yarn --max-model-len 4k --output-dir x", "target_length output"),
    ],
)
def test_names_of_other_tools_are_accepted(command, arguments, canonical):
    parsed = COMMANDS[command].make_context(command, ["demo", *arguments.split()]).params
    assert all(parsed[name] is not None for name in canonical.split())


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("patch demo --method ya", "yarn"),
        ("eval-ppl demo --methods none,yarn,rer", "none,yarn,rerope"),
        ("export demo -e vl", "vllm"),
        ("ruler demo --tasks vt,c", "vt,cwe"),
    ],
)
def test_the_shell_completes_values(ropecli, monkeypatch, words, completed):
    monkeypatch.setenv("_ROPECLI_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"ropecli {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split())))
    assert completed in ropecli().out.splitlines()


def test_token_counts_take_suffixes(ropecli):
    options = ["--method", "YaRN", "--target-length", "1k", "--dry-run", "--json"]
    report = ropecli("patch", "demo", *options).json()
    assert (report["method"], report["target_length"]) == ("yarn", 1024)
    assert ropecli("plan", "demo", "--set", "length=2k", "--json").json()["length"] == 2048
    whole = ropecli("eval-ppl", "demo", "-d", "demo", "-L", 2, "-l", "64", "--chunk", 0, "--json").report()
    assert whole["settings"]["chunk"] is None
    wrong = ropecli("patch", "demo", "--method", "yarn", "--target-length", "1q", "--dry-run")
    wrong.is_refused("--target-length is '1q'; expected a number of tokens")


def test_a_fault_of_ours_is_not_laid_to_the_users_numbers(ropecli, monkeypatch):
    monkeypatch.setattr("ropecli.checkpoint.inspection.inspect_checkpoint", lambda *arguments, **options: 1 / 0)
    with pytest.raises(ArithmeticError):
        ropecli("inspect", "demo")


def test_lengths_follow_from_the_checkpoint_and_the_data(ropecli, llama, tmp_path):
    """The tiny model has a pretraining length of 64; ten documents have 64 tokens, three have 128."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(10):
        (folder / f"{number}.txt").write_text(" ".join(["def"] * (75 if number < 3 else 40)))
    arguments = ["eval-ppl", llama, "--data", folder, "--json"]
    longer = ropecli(*arguments, "--method", "yarn", "--factor", 4)
    for outcome in (ropecli(*arguments), longer):
        assert [row["length"] for row in outcome.report()["rows"]] == [16, 32, 64]
    assert "Measuring up to 64 tokens: only 3 documents of 10 have 128." in longer.err


def test_quiet_prints_the_result_and_errors_only(ropecli):
    arguments = ["eval-ppl", "demo", "-d", "demo", "-L", 2, "-l", "64", "-q"]
    outcome = ropecli(*arguments)
    assert outcome.err == ""
    assert "64" in outcome.out
    assert "error:" in ropecli(*arguments, "--protocol", "nothing").err


def test_a_log_has_a_line_at_the_start_and_every_thirty_seconds(capsys, monkeypatch):
    now = 0.0
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now)
    with terminal._bar("training", 100) as step:
        for number in range(1, 101):
            now = number * 10.0
            step(text=f"loss {number}")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == ["training", "training  3%  loss 3  16 min 10 s left", "training  6%  loss 6  15 min 40 s left"]
    assert len(lines) == 34


# Help.


@pytest.mark.parametrize(
    ("name", "example"),
    [
        (name, example)
        for members in _COMMANDS.values()
        for name, (_, *examples) in members.items()
        for example in examples
    ],
)
def test_the_examples_of_help_are_parsed(name, example):
    COMMANDS[name].make_context(name, example.split())


# ropecli recipe.


def test_recipes_are_listed_and_printed_by_name_or_path(ropecli, monkeypatch):
    listed = ropecli("recipe", "--json").json()
    files = {(path.parent.name, path.stem): path for path in RECIPES.glob("*/*.*")}
    assert {(one["kind"], one["name"]) for one in listed} == files.keys()
    assert all(re.fullmatch(r"[A-Z1-9].*\.", one["summary"]) for one in listed)
    shown = ropecli("recipe").out
    assert all(one["name"] in shown for one in listed)
    text = files["finetune", "qwen2.5-yarn-128k"].read_text(encoding="utf-8")
    assert ropecli("recipe", "qwen2.5-yarn-128k").out == text
    assert ropecli("recipe", "slurm").out.startswith("#!/bin/bash\n")
    assert Path(ropecli("recipe", "--path", "2-nodes").out.strip()).samefile(files["accelerate", "2-nodes"])


@pytest.mark.parametrize("processes", ["1", "2"])
@pytest.mark.parametrize("command", ["recipe --path 2-nodes", "eval-ppl"])
def test_only_processes_that_share_the_work_of_a_launch_are_silent(command, processes, evaluate, ropecli, monkeypatch):
    """Pods and the shells of a cluster's nodes may set RANK, and WORLD_SIZE too."""
    monkeypatch.setattr("ropecli.evaluation.processes.join_workers", Workers)
    monkeypatch.setattr("ropecli.cli.app._end_among_others", lambda status: None)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", processes)
    outcome = evaluate(lengths="24") if command == "eval-ppl" else ropecli(*command.split())
    outcome.succeeds()
    assert bool(outcome.out) == (command != "eval-ppl" or processes != "2")


def test_the_schema_knows_every_key_and_token_counts_with_suffixes(ropecli):
    schema = ropecli("recipe", "--schema").json()
    assert schema["properties"].keys() == Recipe.model_fields.keys()
    assert schema["additionalProperties"] is False
    assert schema["properties"]["stages"]["items"] == {"$ref": "#"}
    number, text, _ = schema["properties"]["length"]["anyOf"]
    assert (number["type"], text["type"]) == ("integer", "string")
    assert re.search(text["pattern"], "64k")
