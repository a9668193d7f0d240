"""ropecli finetune: options, recipe file and --set make one recipe; stages, adapters, dry runs."""

import json
import re
import shutil
import subprocess
import sys

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
    settings = ["--set", "warmup_steps=1", "--set", "mixed_precision=none", "--set", "save_every=1"]
    outcome = finetune("--recipe", recipe, "--steps", 2, "--lr", "1e-4", *settings).succeeds()
    used = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())["recipe"]
    given = {"data": str(corpus), "steps": 2, "length": 32, "seed": 7, "batch_size": 2, "betas": [0.8, 0.9]}
    assert {**used, **given, "learning_rate": 1e-4, "warmup_steps": 1} == used
    assert "2 steps" in outcome.out
    assert "checkpoints/000001." in outcome.err
    assert "checkpoints/000002" not in outcome.err  # removed once the result is written


def test_no_library_speaks_on_standard_error(llama, corpus, tmp_path):
    """In a process of its own: warnings are shown once in each, and pytest takes them for itself."""
    command = [sys.executable, "-m", "ropecli", "finetune", str(llama), "--data", str(corpus), "--length", "32"]
    command += ["--steps", "1", "--set", "warmup_steps=0", "--set", "mixed_precision=none"]
    command += ["--output", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    phases = [f"Opening {llama} ...", "preparing", "tokenizing", "loading", "fine-tuning"]
    processes, warning, summary = [line for line in done.stderr.splitlines() if line not in phases]
    assert processes == "Training with 1 process: 4 sequences of 32 tokens per step."
    assert warning.startswith("warning: the checkpoint reads 64 tokens, and may read them worse after training on 32.")
    assert "336 sequences (long)" in summary


STAGES = """
data: {corpus}
mixed_precision: none
tracker: none
warmup_steps: 0
stages:
  - patch: {{method: yarn, factor: 2}}
    steps: 2
    length: 32
  - patch: {{method: yarn, factor: 4}}
    steps: 1
    length: 48
"""


def test_stages_are_described_by_a_dry_run_and_leave_each_checkpoint(finetune, tmp_path, corpus, config_of):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(STAGES.format(corpus=corpus))
    first, second = finetune("--recipe", recipe, "--dry-run", data=None).succeeds().out.splitlines()
    assert "stage 1 of 2: yarn ×2 to 128 tokens; sequences of 32 tokens" in first
    assert "stage 2 of 2: yarn ×4 to 256 tokens; sequences of 48 tokens" in second
    assert "2 steps of 4 sequences: 128 tokens per step, 256 in total" in first
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]
    assert "3 steps" in finetune("--recipe", recipe, data=None).succeeds().out
    lengths = [config_of(tmp_path / "run" / name)["max_position_embeddings"] for name in ("stages/1", ".")]
    assert lengths == [128, 256]


@pytest.mark.parametrize(("name", "label"), [("llama", "unscaled, 64 tokens"), ("yarn", "yarn ×4, 256 tokens")])
def test_without_a_patch_a_dry_run_names_the_scaling_of_the_folder(finetune, request, name, label):
    outcome = finetune("--dry-run", checkpoint=request.getfixturevalue(name)).succeeds()
    assert outcome.out.startswith(f"as it is: {label}; sequences of ")


def test_an_adapter_is_no_checkpoint_until_it_is_merged(finetune, ropecli, tmp_path, corpus):
    run, whole = tmp_path / "run", tmp_path / "whole"
    options = ["--adapter", "lora", "--set", "save=adapter", "--set", "tracker=none", "--length", 32, "--steps", 1]
    assert "lora trains" in finetune(*options).succeeds().err
    refused = ropecli("patch", run, "--method", "yarn", "--factor", 2, "-o", tmp_path / "patched")
    refused.is_refused(f"ropecli merge {run}")
    ropecli("merge", run, "--output", whole).succeeds()
    ropecli("eval-ppl", whole, "--data", corpus, "--lengths", "32").succeeds()


def test_weights_that_the_config_leaves_unused_are_measured_with_a_warning_and_never_trained(
    finetune, ropecli, edited, llama, corpus, tmp_path
):
    """transformers drops them: what is written from such a model would lack them."""
    folder = edited(llama, num_hidden_layers=1)
    measured = ropecli("eval-ppl", folder, "--data", corpus, "--lengths", "32").succeeds()
    assert "model.layers.1" in measured.err
    refused = finetune("--length", 32, "--steps", 1, checkpoint=folder)
    assert refused.code == 2
    assert "model.layers.1" in refused.err
    assert not list(tmp_path.glob("run*"))


def test_a_dry_run_warns_of_positions_that_the_patch_does_not_reach(finetune):
    settings = ["--set", "window=500", "--set", "patch={method: yarn, factor: 2}"]
    outcome = finetune("--positions", "pose", *settings, "--dry-run").succeeds()
    assert "warning: positions up to 500 exceed the checkpoint's context length, 128" in outcome.err


@pytest.fixture
def chatting(edited, llama, chat_template):
    folder = edited(llama)
    (folder / "chat_template.jinja").write_text(chat_template)
    return folder


def test_data_are_shown_before_they_are_paid_for(finetune, chatting, chat):
    options = ["--length", 600, "--steps", 1, "--set", "warmup_steps=0", "--set", "tracker=none"]
    dry = finetune("--show-data", 2, "--dry-run", *options, checkpoint=chatting, data=chat).succeeds()
    shown = dry.out[dry.out.index("--- sequence 1 of ") :]
    assert shown.count("--- sequence ") == 2
    answers = [
        message["content"]
        for line in chat.read_text().splitlines()
        for message in json.loads(line)["messages"]
        if message["role"] == "assistant"
    ]
    assert re.findall(r"\[\[(.*?)<s>\]\]", shown, re.DOTALL)[0] in answers
    assert "packing conversations, each attending to itself" in dry.err
    result = finetune("--show-data", 1, "--dry-run", *options, "--json", checkpoint=chatting, data=chat).succeeds()
    ((first, *_),) = json.loads(result.out)["sequences"]
    assert first == {"text": first["text"], "is_trained": None}


def test_conversations_stand_alone_where_they_cannot_be_packed(finetune, chatting, chat, monkeypatch):
    from ropecli.training.loss import NextTokenLoss

    options = ["--length", 600, "--steps", 1, "--set", "tracker=none"]
    gaps = finetune("--positions", "pose", "--set", "window=700", *options, checkpoint=chatting, data=chat).succeeds()
    assert "one conversation per sequence: --positions pose." in gaps.err
    assert "12 sequences (single)" in gaps.err
    shutil.rmtree(chatting.parent / "run")
    with_gaps = NextTokenLoss.hidden
    monkeypatch.setattr(
        NextTokenLoss, "hidden", lambda self, ids, positions, packed: with_gaps(self, ids, positions, False)
    )
    unproved = finetune(*options, checkpoint=chatting, data=chat).succeeds()
    assert "one conversation per sequence: LlamaForCausalLM lets packed documents attend to one another" in unproved.err
    shutil.rmtree(chatting.parent / "run")
    refused = finetune("--sequences", "packed", *options, checkpoint=chatting, data=chat)
    refused.is_refused("lets packed documents attend to one another")
