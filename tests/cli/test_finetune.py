"""ropecli finetune: options, recipe file and --set make one recipe, and what is wrong is one message."""

import pytest
import yaml


@pytest.fixture
def finetune(ropecli, llama, corpus, tmp_path):
    def call(*options, checkpoint=llama, data=corpus):
        source = ["--data", data] if data else []
        return ropecli("finetune", checkpoint, *source, "--output", tmp_path / "run", *options)

    return call


def test_options_and_settings_come_before_the_recipe_file(finetune, tmp_path, corpus):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("data: nowhere\nsteps: 50\nlength: 32\nseed: 7\nbatch_size: 2\nbetas: [0.8, 0.9]\n")
    options = ["--recipe", recipe, "--steps", 2, "--lr", "1e-4", "--set", "warmup_steps=1"]
    outcome = finetune(*options, "--set", "mixed_precision=none")
    assert outcome.code == 0, outcome.err
    asked = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())["recipe"]
    given = {"data": str(corpus), "steps": 2, "length": 32, "seed": 7, "batch_size": 2, "betas": [0.8, 0.9]}
    assert {**asked, **given, "learning_rate": 1e-4, "warmup_steps": 1} == asked
    assert "2 steps" in outcome.out


def test_what_is_used_and_left_out_is_said_on_standard_error(finetune):
    outcome = finetune("--length", 32, "--steps", 1, "--set", "mixed_precision=none")
    assert outcome.code == 0
    assert "sequences of 32 tokens from 12 documents" in outcome.err
    assert len(outcome.out.splitlines()) == 1


WRONG = {
    "no data": ({"data": None}, [], "data"),
    "the held-out demo": ({"data": "demo"}, [], "demo-train"),
    "no such data": ({"data": "nowhere"}, [], "nowhere"),
    "no such recipe": ({}, ["--recipe", "absent.yaml"], "absent.yaml"),
    "a key that is not known": ({}, ["--set", "lenght=3"], "lenght"),
    "no step": ({}, ["--steps", "0"], "steps"),
    "a rate that is no number": ({}, ["--lr", "nan"], "learning_rate"),
    "betas out of bounds": ({}, ["--set", "betas=[2.0, 0.9]"], "betas"),
    "a setting without a value": ({}, ["--set", "steps"], "KEY=VALUE"),
    "no document is long enough": ({}, ["--length", "100000"], "No document is as long as 100000"),
    "no such checkpoint": ({"checkpoint": "nowhere"}, [], "nowhere"),
}


@pytest.mark.parametrize(("where", "options", "expected"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_one_message_and_leaves_nothing(finetune, tmp_path, where, options, expected, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = finetune("--set", "mixed_precision=none", *options, **where)
    assert outcome.code == 2
    assert outcome.out == ""
    assert expected in outcome.err
    assert outcome.err.count("error:") == 1
    assert "Traceback" not in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_no_library_speaks_on_standard_error(llama, corpus, tmp_path):
    """In a process of its own: warnings are shown once in each, and pytest takes them for itself."""
    import subprocess
    import sys

    command = [sys.executable, "-m", "ropecli", "finetune", str(llama), "--data", str(corpus), "--length", "32"]
    command += ["--steps", "1", "--set", "warmup_steps=0", "--output", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(said) == 1, said
    assert said[0].startswith("336 sequences of 32 tokens")
