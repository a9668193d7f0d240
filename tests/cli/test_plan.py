"""`ropecli plan`: needs a config alone, says what fits, and prints a command that our own `finetune` reads."""

import json
import re
import shlex
from pathlib import Path

import pytest
import typer

import ropecli
from ropecli.errors import RopecliError


@pytest.fixture
def plan(capsys, monkeypatch):
    """plan(folder, ...) -> (standard output, standard error); what goes wrong is raised."""
    from ropecli import commands
    from ropecli.cli import plan as rendering
    from ropecli.cli.progress import shown_progress
    from ropecli.cli.typer_command import as_command

    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(as_command(commands.plan, rendering.render))

    def call(*arguments: object) -> tuple[str, str]:
        monkeypatch.setenv("COLUMNS", "200")
        capsys.readouterr()
        with shown_progress(()):
            app([str(argument) for argument in arguments], standalone_mode=False)
        return tuple(capsys.readouterr())

    return call


@pytest.fixture
def config_alone(llama, tmp_path) -> Path:
    """The tiny Llama's config.json, and nothing else."""
    folder = tmp_path / "config-alone"
    folder.mkdir()
    (folder / "config.json").write_bytes((llama / "config.json").read_bytes())
    return folder


def options_of_finetune(line: str) -> dict:
    """What our command line reads of the printed command's own part."""
    from typer.main import get_command

    from ropecli.cli.app import app

    words = shlex.split(line)
    words = words[words.index("finetune") + 1 :]
    context = get_command(app).commands["finetune"].make_context("finetune", words)
    return context.params


def test_numbers_from_a_config_alone(config_alone, plan):
    report = json.loads(plan(config_alone, "--length", 64, "--gpus", 1, "--json")[0])
    # embeddings and head, then a layer's attention, its MLP, its norms, and the last norm
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96 + 2 * 64
    assert report["parameters"]["total"] == 2 * 512 * 64 + 2 * layer + 64
    assert report["kv_cache"] == 2 * 2 * 32 * 2 * 64
    memory = report["memory"]
    parts = ("weights", "gradients", "optimizer", "activations", "working", "engine", "runtime")
    assert memory["total"] == sum(memory[name] for name in parts)
    assert report["host_memory"]["machine"] is None  # the plan is for another machine, which has a GPU
    assert report["host_memory"]["loading"] == 4 * report["parameters"]["total"]
    assert report["tokens_per_step"] == 4 * 64
    assert report["seconds"] == pytest.approx(report["flops"] / (report["mfu"] * report["gpu_flops"]))


@pytest.mark.parametrize("gpus", [2, 8])
def test_the_command_is_one_that_finetune_reads(gpus, config_alone, plan):
    out, _ = plan(config_alone, "--length", 64, "--gpus", gpus, "--set", "batch_size=2", "--json")
    report = json.loads(out)
    params = options_of_finetune(report["command"])
    assert (params["checkpoint"], params["length"]) == (str(config_alone), "64")
    assert "batch_size=2" in params["settings"]
    words = shlex.split(report["command"])
    if "--config_file" in words:
        [name] = re.findall(r"\$\(ropecli recipe --path (.*)\)", words[words.index("--config_file") + 1])
        assert ropecli.recipe(name).recipes[0].kind == "accelerate"
    assert words[words.index("--num_processes") + 1] == str(gpus)


@pytest.mark.parametrize(("gpus", "precision"), [(4, "none"), (8, "bf16")])
def test_every_command_is_one_that_accelerate_reads(gpus, precision, config_alone):
    from accelerate.commands.launch import launch_command_parser
    from transformers import AutoConfig

    from ropecli.training.memory_plan.estimate import MemoryEstimator
    from ropecli.training.memory_plan.setups import find_setups, launch_command
    from ropecli.training.settings import Recipe

    recipe = Recipe(data="none is read", mixed_precision=precision)
    for one in find_setups(MemoryEstimator(AutoConfig.from_pretrained(config_alone)), recipe, 64, gpus, 10**12):
        words = shlex.split(launch_command(one, str(config_alone), 64, None, {}))
        assert words[:2] == ["accelerate", "launch"]
        read = launch_command_parser().parse_args(words[2:])
        assert (read.module, read.training_script) == (True, "ropecli")
        assert read.training_script_args[0] == "finetune"
        assert read.num_processes == gpus
        assert read.mixed_precision == ("bf16" if precision == "bf16" else "no")
        if one.engine == "ulysses":
            assert read.parallelism_config_sp_size == gpus


def test_the_recipe_is_followed(config_alone, plan, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("data: demo-train\nlength: 32\nsteps: 7\nbatch_size: 3\ngradient_accumulation: 1\n")
    report = json.loads(plan(config_alone, "--recipe", path, "--json")[0])
    assert (report["length"], report["steps"], report["tokens_per_step"]) == (32, 7, 96)
    assert str(path) in report["command"]


def test_a_recipe_keeps_its_name_in_the_command(config_alone, plan):
    report = json.loads(plan(config_alone, "--recipe", "demo", "--json")[0])
    assert report["steps"] == 100
    assert "--recipe demo" in report["command"]


def test_stages_are_planned_by_the_longest_and_keep_their_own_lengths(config_alone, plan, tmp_path):
    path = tmp_path / "recipe.yaml"
    stage = "  - patch: {{method: yarn, factor: {0}}}\n    length: {1}\n"
    path.write_text("data: demo-train\nstages:\n" + stage.format(4, 128) + stage.format(2, 96))
    out, err = plan(config_alone, "--recipe", path, "--json")
    report = json.loads(out)
    assert report["length"] == 128
    assert err == ""  # the recipe patches it first
    assert "--length" not in report["command"]


def test_memory_decides_what_fits(config_alone, plan):
    wide = json.loads(plan(config_alone, "--length", 64, "--gpu-memory", "80GB", "--json")[0])
    assert all(row["fits"] for row in wide["options"] if not row["refused"])
    assert wide["memory"]["total"] <= wide["gpu_memory"] == 80 * 10**9
    assert json.loads(plan(config_alone, "--gpu-memory", "80GiB", "--json")[0])["gpu_memory"] == 80 * 2**30


def test_a_length_beyond_the_window_is_warned_of(config_alone, plan):
    out, err = plan(config_alone, "--length", 128, "--json")
    assert "patch it first" in err
    assert json.loads(out)["length"] == 128


def test_a_tensor_that_does_not_fit_by_itself_is_named(config_alone, plan):
    """gpt-oss's attention in transformers stores the scores of all pairs of tokens."""
    config = json.loads((config_alone / "config.json").read_text())
    config |= {"model_type": "gpt_oss", "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 64}
    (config_alone / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        RopecliError, match=r"in one tensor of GptOssAttention: use --set attn=flex_attention or shorten --length"
    ):
        plan(config_alone, "--length", "32k", "--gpu-memory", "2GB")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gpus", 0], "--gpus is 0"),
        (["--gpu-memory", "80 bananas"], "80GB"),
        (["--gpu-memory", "80"], "80GB"),
        (["--gpu", "abacus"], "--gpu 'abacus'"),
        (["--set", "nothing=1"], "nothing"),
        (["--gpu-memory", "1MB"], "Nothing fits"),
        (["--host-memory", "512 bananas"], "--host-memory"),
        (["--host-memory", "1kB"], "Nothing fits.*main memory"),
    ],
)
def test_what_cannot_be_is_refused_in_one_message(options, words, config_alone, plan):
    with pytest.raises(RopecliError, match=words):
        plan(config_alone, "--length", 64, *options)
