"""Conventions that all commands share: aliases, suffixes, verbosity, progress without a terminal."""

import json
from types import SimpleNamespace

import pytest
import typer

from ropecli.cli import progress
from ropecli.cli.app import app
from ropecli.cli.typer_command import ALIASES
from ropecli.evaluation.subject import default_lengths

COMMANDS = typer.main.get_command(app).commands


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_the_common_options_and_a_short_help(name, ropecli):
    outcome = ropecli(name, "-h")
    assert outcome.code == 0
    for option in ("--json", "--quiet", "-q", "--verbose", "-v"):
        assert option in outcome.out
    assert not any(alias in outcome.out.split() for aliases in ALIASES.values() for alias in aliases)


@pytest.mark.parametrize(
    ("command", "arguments", "canonical"),
    [
        ("eval-ppl", ["demo", "-d", "x", "--limit", "3", "--attn-implementation", "sdpa"], ["max_documents", "attn"]),
        ("eval-ppl", ["demo", "-d", "x", "-L", "3"], ["max_documents"]),
        ("finetune", ["demo", "--output-dir", "x", "--max-steps", "3", "--max-length", "4k"], ["output", "steps"]),
        ("finetune", ["demo", "-o", "x", "--per-device-train-batch-size", "2"], ["batch_size"]),
        ("finetune", ["demo", "-o", "x", "--gradient-accumulation-steps", "2"], ["gradient_accumulation"]),
        ("finetune", ["demo", "-o", "x", "--report-to", "none", "--config", "r.yaml"], ["tracker", "recipe"]),
        ("patch", ["demo", "--max-model-len", "4k", "--output-dir", "x"], ["target_length", "output"]),
    ],
)
def test_names_of_other_tools_are_accepted(command, arguments, canonical):
    parsed = COMMANDS[command].make_context(command, list(arguments)).params
    assert all(parsed[name] is not None for name in canonical)


def test_a_report_is_no_folder(ropecli):
    assert "No such option" in ropecli("eval-ppl", "demo", "-d", "demo", "--output-dir", "x").err


def test_token_counts_take_suffixes(ropecli):
    report = json.loads(
        ropecli("patch", "demo", "--method", "YaRN", "--target-length", "1k", "--dry-run", "--json").out
    )
    assert (report["method"], report["target_length"]) == ("yarn", 1024)
    recipe = json.loads(ropecli("plan", "demo", "--set", "length=2k", "--json").out)
    assert recipe["length"] == 2048
    whole = ropecli("eval-ppl", "demo", "-d", "demo", "-L", 2, "-l", "64", "--chunk", 0, "--json")
    assert json.loads(whole.out)["settings"]["chunk"] is None
    wrong = ropecli("patch", "demo", "--method", "yarn", "--target-length", "1q", "--dry-run")
    assert "--target-length is '1q'; expected a number of tokens" in wrong.err


@pytest.mark.parametrize(
    ("pretraining", "context", "lengths"),
    [(256, 256, [64, 128, 256]), (4096, 10_000, [1024, 2048, 4096, 8192, 10_000]), (16, 16, [16])],
)
def test_default_lengths_double_up_to_the_context_length(pretraining, context, lengths):
    subject = SimpleNamespace(pretraining_length=pretraining, context_length=context)
    assert default_lengths([subject]) == lengths


def test_lengths_follow_from_the_checkpoint_and_the_data(ropecli, llama, tmp_path):
    """The tiny model has a pretraining length of 64; ten documents have 64 tokens, three have 128."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(10):
        words = 75 if number < 3 else 40
        (folder / f"{number}.txt").write_text(" ".join(["def"] * words))
    arguments = ["eval-ppl", llama, "--data", folder]
    report = ropecli(*arguments, "--json")
    assert [row["length"] for row in json.loads(report.out)["rows"]] == [16, 32, 64]
    longer = ropecli(*arguments, "--method", "yarn", "--factor", 4, "--json")
    assert [row["length"] for row in json.loads(longer.out)["rows"]] == [16, 32, 64]
    assert "Measuring up to 64 tokens: only 3 documents of 10 have 128." in longer.err


def test_quiet_prints_the_result_and_errors_only(ropecli):
    arguments = ["eval-ppl", "demo", "-d", "demo", "-L", 2, "-l", "64", "-q"]
    outcome = ropecli(*arguments)
    assert outcome.err == ""
    assert "64" in outcome.out
    assert "error:" in ropecli(*arguments, "--protocol", "nothing").err


def test_a_log_has_a_line_at_the_start_and_every_thirty_seconds(capsys, monkeypatch):
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with progress._bar("scoring", 100) as step:
        for number in range(1, 101):
            now = number * 10.0
            step(text=f"loss {number}")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == ["scoring 0/100", "scoring 3/100, loss 3, 16:10 left", "scoring 6/100, loss 6, 15:40 left"]
    assert len(lines) == 34


def test_a_patch_that_shortens_the_context_is_warned_of(ropecli, llama, tmp_path):
    config = json.loads((llama / "config.json").read_text())
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    rope = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
    (shipped / "config.json").write_text(
        json.dumps({**config, "max_position_embeddings": 2048, "rope_parameters": rope})
    )
    outcome = ropecli("patch", shipped, "--method", "yarn", "--factor", 4, "--dry-run")
    assert "this shortens the context" in outcome.err
    assert "--target-length 2048" in outcome.err
    assert "shortens" not in ropecli("patch", shipped, "--method", "yarn", "--factor", 32, "--dry-run").err
