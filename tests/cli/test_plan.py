"""`ropecli plan`: needs a config alone, says what fits, and prints a command that our own `finetune` reads."""

import json
import re
import shlex
from pathlib import Path

import pytest
import typer

import ropecli as package
from ropecli.cli.app import app


@pytest.fixture
def plan(ropecli):
    return lambda *arguments: ropecli("plan", *arguments, "--json").json()


@pytest.fixture
def config_alone(llama, tmp_path) -> Path:
    """The tiny Llama's config.json, and nothing else."""
    folder = tmp_path / "config-alone"
    folder.mkdir()
    (folder / "config.json").write_bytes((llama / "config.json").read_bytes())
    return folder


def test_numbers_from_a_config_alone(config_alone, plan):
    report = plan(config_alone, "--length", 64, "--gpus", 1)
    # embeddings and head, then a layer's attention, its MLP, its norms, and the last norm
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96 + 2 * 64
    assert report["parameters"]["total"] == 2 * 512 * 64 + 2 * layer + 64
    assert report["kv_cache"] == 2 * 2 * 32 * 2 * 64
    memory = report["memory"]
    parts = ("weights", "gradients", "optimizer", "activations", "working", "engine", "runtime")
    assert memory["total"] == sum(memory[name] for name in parts)
    assert report["host_memory"]["machine"] is None  # the plan is for another machine, which has a GPU
    assert report["host_memory"]["needed"] == 4 * report["parameters"]["total"]
    assert report["tokens_per_step"] == 4 * 64
    assert report["seconds"] == pytest.approx(report["flops"] / (report["mfu"] * report["gpu_flops"]))


def test_the_command_is_one_that_finetune_reads(config_alone, plan):
    report = plan(config_alone, "--length", 64, "--gpus", 8, "--set", "batch_size=2")
    words = shlex.split(report["command"])
    finetune = typer.main.get_command(app).get_command(None, "finetune")
    params = finetune.make_context("finetune", words[words.index("finetune") + 1 :]).params
    assert (params["checkpoint"], params["length"]) == (str(config_alone), "64")
    assert "batch_size=2" in params["settings"]
    if "--config_file" in words:
        [name] = re.findall(r"\$\(ropecli recipe --path (.*)\)", words[words.index("--config_file") + 1])
        assert package.recipe(name).recipes[0].kind == "accelerate"
    assert words[words.index("--num_processes") + 1] == "8"


@pytest.mark.parametrize(("gpus", "precision"), [(4, "none"), (8, "bf16")])
def test_every_command_is_one_that_accelerate_reads(gpus, precision, config_alone):
    from accelerate.commands.launch import launch_command_parser
    from transformers import AutoConfig

    from ropecli.training.memory_plan.estimate import MemoryEstimator
    from ropecli.training.memory_plan.setups import find_setups, launch_command
    from ropecli.training.recipe_schema import Recipe

    recipe = Recipe(data="none is read", mixed_precision=precision)
    for one in find_setups(MemoryEstimator(AutoConfig.from_pretrained(config_alone)), recipe, 64, gpus, 10**12):
        words = [
            word for word in shlex.split(launch_command(one, str(config_alone), 64, None, {})) if "CUDA" not in word
        ]
        assert words[:2] == ["accelerate", "launch"]
        read = launch_command_parser().parse_args(words[2:])
        assert (read.module, read.training_script) == (True, "ropecli")
        assert read.training_script_args[0] == "finetune"
        assert read.num_processes == gpus
        assert read.mixed_precision == ("bf16" if precision == "bf16" else "no")
        shared = [word for word in read.training_script_args if word.startswith("context_parallel_size")]
        size = one.launch.sequence_ranks
        assert shared == ([f"context_parallel_size={size}"] if size > 1 else [])


def test_the_recipe_is_followed(config_alone, plan, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("data: demo-train\nlength: 32\nsteps: 7\nbatch_size: 3\ngradient_accumulation: 1\n")
    report = plan(config_alone, "--recipe", path)
    assert (report["length"], report["steps"], report["tokens_per_step"]) == (32, 7, 96)
    assert str(path) in report["command"]
    assert "--recipe demo" in plan(config_alone, "--recipe", "demo")["command"]


def test_stages_are_planned_by_the_longest_and_keep_their_own_lengths(config_alone, ropecli, tmp_path):
    path = tmp_path / "recipe.yaml"
    stage = "  - patch: {{method: yarn, factor: {0}}}\n    length: {1}\n"
    path.write_text("data: demo-train\nstages:\n" + stage.format(4, 128) + stage.format(2, 96))
    command = ("plan", config_alone, "--recipe", path, "--set", "seed=null", "--set", "eval_lengths=[64]")
    ropecli(*command).is_refused("eval_lengths: it has no effect in any stage")
    command = (*command[:-1], "lora_targets=[q_proj]", "--set", "adapter=lora")
    outcome = ropecli(*command, "--json")
    report = outcome.json()
    assert (report["length"], report["stage"], report["stages"]) == (128, 1, 2)
    words = shlex.split(report["command"])
    assert not {"seed=null", 'lora_targets=["q_proj"]', "adapter=lora"} - set(words)
    assert "of stage 1, the longest. The command runs all 2 stages" in ropecli(*command).printed
    assert "To read" not in outcome.err  # the recipe patches it
    assert "--length" not in report["command"]


def test_memory_decides_what_fits(config_alone, plan):
    report = plan(config_alone, "--length", 64, "--gpu-memory", "80GB")
    assert all(row["fits"] for row in report["options"] if not row["refused"])
    assert report["memory"]["total"] <= report["gpu_memory"] == 80 * 10**9
    assert plan(config_alone, "--gpu-memory", "80GiB")["gpu_memory"] == 80 * 2**30


def test_a_length_beyond_the_context_length_is_warned_of(config_alone, ropecli):
    outcome = ropecli("plan", config_alone, "--length", 128)
    assert f"To read 128 tokens, measured on your texts: `ropecli extend {config_alone} --length 128" in outcome.said
    assert "at 128 tokens on 1 ×" in outcome.printed


def test_attention_that_stores_scores_is_named(config_alone, ropecli):
    """gpt-oss's attention in transformers stores the scores of all pairs of tokens."""
    config = json.loads((config_alone / "config.json").read_text())
    config |= {"model_type": "gpt_oss", "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 64}
    (config_alone / "config.json").write_text(json.dumps(config))
    refused = ropecli("plan", config_alone, "--length", "32k", "--gpu-memory", "2GB")
    refused.is_refused("Increase --gpus or shorten --length. Or --set attn=flex_attention or sdpa: eager stores")
