"""Stages: each begins with the last one's result, patched from the true window; a kill anywhere loses nothing."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ropecli.checkpoint.reading import open_checkpoint
from ropecli.errors import MethodError, OutputError, PatchError, RecipeError
from ropecli.finetune.lengths import settle_lengths
from ropecli.finetune.recipe import make_recipe
from ropecli.finetune.stages import describe, plan_stages, run_stages
from ropecli.rope import ScalingSpec

KEYS = {
    "steps": 2,
    "batch_size": 2,
    "gradient_accumulation": 1,
    "learning_rate": 1e-3,
    "warmup_steps": 0,
    "save_every": 1,
    "mixed_precision": "none",
    "gradient_checkpointing": False,
    "tracker": "none",
    "stages": [
        {"patch": {"method": "yarn", "factor": 2}, "length": 96},
        {"patch": {"method": "yarn", "factor": 4}, "length": 160, "steps": 3},
    ],
}
WINDOW = 64  # of the tiny Llama


@pytest.fixture(scope="module")
def recipe_of(corpus, tmp_path_factory):
    """recipe_of(key=value, ...) -> the recipe of a file with these keys; options would hold in all stages."""
    path = tmp_path_factory.mktemp("recipes") / "recipe.yaml"

    def read(**keys):
        path.write_text(yaml.safe_dump({"data": str(corpus), **KEYS, **keys}))
        return make_recipe(path, {})

    return read


@pytest.fixture(scope="module")
def staged(recipe_of, llama):
    """staged(output, key=value, ...) -> output, when all stages are done."""

    def run(output, *, checkpoint=llama, resume=False, on_step=lambda progress: None, said=None, **keys):
        say = said.append if said is not None else lambda message: None
        run_stages(open_checkpoint(checkpoint), recipe_of(**keys), output, resume=resume, say=say, on_step=on_step)
        return output

    return run


@pytest.fixture(scope="module")
def finished(staged, tmp_path_factory):
    return staged(tmp_path_factory.mktemp("runs") / "finished")


def files(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_planning_gives_each_stage_its_factor_window_and_tokens(recipe_of, llama):
    stages = plan_stages(
        open_checkpoint(llama), recipe_of(stages=[{"patch": {"method": "yarn", "factor": 2}}, {"steps": 7}])
    )
    assert [(stage.number, stage.length, stage.window) for stage in stages] == [(1, 128, 128), (2, 128, 128)]
    assert stages[0].plan.spec == ScalingSpec("yarn", 2.0, stages[0].plan.spec.params)
    assert stages[1].plan is None  # it goes on with what the first one made
    assert stages[1].tokens_per_step(processes=8) == 2 * 1 * 8 * 128
    first, second = describe(stages, processes=8)
    assert first.startswith("stage 1 of 2: yarn ×2")
    assert "2,048 tokens a step, 4,096 in all" in first
    assert "no patch" in second
    assert "7 steps of 16 sequences" in second


def test_planning_reads_configs_alone(recipe_of, llama, tmp_path):
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    before = files(tmp_path)
    assert [stage.window for stage in plan_stages(open_checkpoint(tmp_path), recipe_of())] == [128, 256]
    assert files(tmp_path) == before


def test_positions_with_gaps_default_to_sequences_of_the_pretraining_window(recipe_of, patched_llama):
    checkpoint = open_checkpoint(patched_llama)
    gaps = {"stages": [], "length": None}
    assert settle_lengths(recipe_of(**gaps), checkpoint) == (128, 128)
    assert settle_lengths(recipe_of(**gaps, positions="pose"), checkpoint) == (64, 128)
    assert settle_lengths(recipe_of(**gaps, positions="pose", window=512), checkpoint) == (64, 512)
    with pytest.raises(RecipeError, match=r"300 tokens into a window of 128"):
        settle_lengths(recipe_of(stages=[], length=300, positions="pose"), checkpoint)


def test_stock_transformers_loads_the_result_at_the_last_window(finished):
    import torch
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(finished, output_loading_info=True)
    assert not any(report.values())
    assert model.config.max_position_embeddings == 4 * WINDOW
    assert model.config.rope_parameters["factor"] == 4.0
    assert model.config.rope_parameters["original_max_position_embeddings"] == WINDOW
    with torch.no_grad():
        assert model(torch.arange(200)[None]).logits.isfinite().all()


def test_the_second_stage_is_what_patching_and_training_the_first_by_hand_gives(
    finished, llama, recipe_of, tmp_path, weights_of, corpus
):
    from ropecli.checkpoint.plan import make_plan
    from ropecli.checkpoint.writing import patch_to
    from ropecli.finetune.training import finetune_checkpoint

    source = llama
    for number, run in enumerate(recipe_of().runs, 1):
        patched, trained = tmp_path / f"{number}-patched", tmp_path / f"{number}"
        patch_to(make_plan(open_checkpoint(source), ScalingSpec("yarn", 2.0 * number)), patched)
        finetune_checkpoint(open_checkpoint(patched), run, trained)
        source = trained
    assert weights_of(finished) == weights_of(source)
    assert weights_of(finished / "stages" / "1") == weights_of(tmp_path / "1")
    assert json.loads((finished / "config.json").read_text()) == json.loads((source / "config.json").read_text())


def test_the_folder_holds_the_result_and_the_earlier_stages(finished, llama):
    assert {path.name for path in finished.iterdir()} == {
        *(path.name for path in llama.iterdir()),
        "ropecli.yaml",
        "run.yaml",
        "metrics.jsonl",
        "stages",
    }
    assert [path.name for path in (finished / "stages").iterdir()] == ["1"]
    assert json.loads((finished / "stages" / "1" / "config.json").read_text())["max_position_embeddings"] == 2 * WINDOW
    record = yaml.safe_load((finished / "ropecli.yaml").read_text())
    assert record["original_max_position_embeddings"] == WINDOW
    assert record["finetuned"]["recipe"]["steps"] == 3


def test_a_single_run_with_a_patch_leaves_no_stages(staged, tmp_path):
    run = staged(tmp_path / "run", stages=[], patch={"method": "linear", "factor": 2}, length=96)
    assert not (run / "stages").exists()
    assert json.loads((run / "config.json").read_text())["rope_parameters"]["factor"] == 2.0


def test_a_single_run_without_a_patch_is_a_plain_run(staged, tmp_path, tune, patched_llama, weights_of):
    keys = {key: value for key, value in KEYS.items() if key != "stages"}
    run = staged(tmp_path / "staged", checkpoint=patched_llama, stages=[{"steps": 2}], length=96)
    plain = tune(patched_llama, tmp_path / "plain", **{**keys, "length": 96})
    assert files(run) == files(plain)
    assert weights_of(run) == weights_of(plain)


def test_steps_are_counted_over_all_stages(staged, tmp_path):
    steps, said = [], []
    staged(tmp_path / "run", on_step=lambda progress: steps.append(progress.step), said=said)
    assert steps == [1, 2, 3, 4, 5]
    assert any(message.startswith("stage 2 of 2: yarn ×4") for message in said)
    assert any("earlier stage's checkpoint is kept" in message for message in said)


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_a_run_stopped_after_any_step_goes_on(staged, tmp_path, finished, weights_of, step):
    def stop(progress):
        if progress.step == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        staged(tmp_path / "run", on_step=stop)
    run = staged(tmp_path / "run", resume=True)
    assert weights_of(run) == weights_of(finished)
    assert files(run) == files(finished)


@pytest.mark.parametrize(("number", "stopped"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_in_a_stages_last_step_keeps_the_next_one_from_beginning(
    staged, tmp_path, finished, weights_of, number, stopped
):
    steps, said = [], []

    def ask(progress):
        steps.append(progress.step)
        if progress.step == 2:
            os.kill(os.getpid(), number)

    with pytest.raises(stopped):
        staged(tmp_path / "run", on_step=ask, said=said)
    assert steps == [1, 2]
    assert "--resume" in said[-1]
    assert weights_of(staged(tmp_path / "run", resume=True)) == weights_of(finished)


# Forks a run for each renaming, or removal of a folder, there is, and kills it there, until one ends by itself.
KILLER = """
import os, pathlib, shutil, signal, sys
import accelerate, torch._dynamo, transformers.models.llama.modeling_llama
from ropecli.checkpoint.reading import open_checkpoint
from ropecli.finetune.recipe import make_recipe
from ropecli.finetune.stages import run_stages
import ropecli.finetune.training

checkpoint, output, recipe = sys.argv[1], *map(pathlib.Path, sys.argv[2:])
count = 0

def die_at(moment, function):
    def call(path, *arguments, **options):
        global count
        count += os.path.exists(path)
        if count == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(path, *arguments, **options)
    return call

for moment in range(1, 200):
    child = os.fork()
    if not child:
        for name in ("rename", "replace"):
            setattr(pathlib.Path, name, die_at(moment, getattr(pathlib.Path, name)))
        shutil.rmtree = die_at(moment, shutil.rmtree)
        run_stages(open_checkpoint(checkpoint), make_recipe(recipe, {}), output / str(moment))
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != -signal.SIGKILL:
        break
"""


def test_a_run_killed_before_any_renaming_or_removal_goes_on(staged, tmp_path, llama, corpus, finished, weights_of):
    recipe, output = tmp_path / "recipe.yaml", tmp_path / "runs"
    recipe.write_text(yaml.safe_dump({"data": str(corpus), **KEYS}))
    command = [sys.executable, "-c", KILLER, str(llama), str(output), str(recipe)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    runs = sorted(output.iterdir(), key=lambda path: int(path.name))
    assert len(runs) > 20
    faults = {}
    for run in runs:
        try:
            staged(run, resume=True)
        except Exception as error:
            faults[run.name] = repr(error)
            continue
        if weights_of(run) != weights_of(finished) or files(run) != files(finished):
            faults[run.name] = sorted(files(run) ^ files(finished))
    assert faults == {}


def test_a_finished_run_is_done_already(staged, finished, weights_of, tmp_path):
    steps, said, before = [], [], files(finished)
    staged(finished, resume=True, on_step=steps.append, said=said)
    assert steps == []
    assert sum("done already" in message for message in said) == 2
    assert files(finished) == before


def test_a_fault_in_a_later_patch_is_found_before_anything_is_trained(staged, tmp_path):
    first = KEYS["stages"][0]
    for patch, error, words in [
        ({"method": "yarn", "target_length": 32}, MethodError, "below the pretraining window, 64"),
        ({"method": "yrn", "factor": 4}, MethodError, "yarn"),
        ({"method": "yarn"}, MethodError, "factor or target_length"),
        ({"method": "dynamic-yarn", "factor": 4}, PatchError, "follows the current length"),
        ({"method": "yarn", "factor": 4, "params": {"betafast": 3}}, MethodError, "betafast"),
    ]:
        with pytest.raises(error, match="stage 2 of 2: ") as caught:
            staged(tmp_path / "run", stages=[first, {"patch": patch, "length": 96}])
        assert words in str(caught.value)
        assert not (tmp_path / "run").exists()


def test_an_adapter_is_no_beginning_for_a_later_stage(recipe_of, llama):
    stages = [{**KEYS["stages"][0], "adapter": "lora", "save": "adapter"}, KEYS["stages"][1]]
    with pytest.raises(RecipeError, match="stage 1 of 2: save: adapter"):
        plan_stages(open_checkpoint(llama), recipe_of(stages=stages))


def test_an_adapter_names_a_base_that_stays(staged, tmp_path, llama, weights_of):
    one, two = KEYS["stages"]
    for name, stages in (("one", [one]), ("two", [one, two])):
        last = {**stages[-1], "adapter": "lora", "save": "adapter"}
        run = staged(tmp_path / name, stages=[*stages[:-1], last])
        assert (run / "adapter_model.safetensors").is_file()
        base = Path(json.loads((run / "adapter_config.json").read_text())["base_model_name_or_path"])
        assert weights_of(base) == weights_of(run / "stages" / "1" if name == "two" else llama)
        before = files(run)
        staged(run, resume=True, stages=[*stages[:-1], last])
        assert files(run) == before


def test_a_changed_recipe_is_refused(staged, finished):
    one, two = KEYS["stages"]
    with pytest.raises(RecipeError, match=r"stages\.1\.steps: 3 then, 4 now"):
        staged(finished, resume=True, stages=[one, {**two, "steps": 4}])
    with pytest.raises(RecipeError, match=r"stages\.2\.length: .* then, 160 now"):
        staged(finished, resume=True, stages=[one, two, two])


def test_another_folder_is_left_alone(staged, finished, tmp_path):
    with pytest.raises(OutputError, match="holds a run already"):
        staged(finished)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="not empty"):
        staged(tmp_path, resume=True)


def test_a_folder_in_use_is_left_to_its_user(staged, tmp_path):
    from ropecli.finetune.state import own_folder

    with own_folder(tmp_path / "run"), pytest.raises(OutputError, match="in use"):
        staged(tmp_path / "run")


def test_the_patch_of_a_stage_links_the_weights(staged, tmp_path, monkeypatch):
    """The patched folder takes no room while it is there."""
    seen = {}

    def look(progress):
        folder = tmp_path / "run" / "stages" / f"{1 if progress.step < 3 else 2}-patched"
        seen[folder.name] = (folder / "model.safetensors").stat().st_nlink

    staged(tmp_path / "run", on_step=look)
    assert seen.keys() == {"1-patched", "2-patched"}
    assert min(seen.values()) > 1


TWO = """
import os, pathlib, sys
from ropecli.checkpoint.reading import open_checkpoint
from ropecli.finetune.recipe import make_recipe
from ropecli.finetune.stages import run_stages

checkpoint, (output, recipe) = open_checkpoint(sys.argv[1]), map(pathlib.Path, sys.argv[2:])
run_stages(checkpoint, make_recipe(recipe, {}), output, say=print)
sys.stdout.flush()
os._exit(0)  # gloo at times aborts a process that tidies up after a DDP backward pass, with nothing but torch in it
"""


def test_of_two_processes_one_patches_and_both_train(tmp_path, llama, corpus, staged):
    import numpy as np
    from safetensors.torch import load_file

    (tmp_path / "two.py").write_text(TWO)
    (tmp_path / "two.yaml").write_text(yaml.safe_dump({"data": str(corpus), **KEYS, "batch_size": 1}))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launcher, str(tmp_path / "two.py"), str(llama), str(tmp_path / "two"), str(tmp_path / "two.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("stage 2 of 2: yarn ×4") == 1
    one = staged(tmp_path / "one", batch_size=2)
    assert files(one) == files(tmp_path / "two")
    before, both, alone = (load_file(folder / "model.safetensors") for folder in (llama, tmp_path / "two", one))
    for name, value in both.items():
        moved = np.linalg.norm(alone[name] - before[name])
        assert np.linalg.norm(value - alone[name]) < 0.02 * moved
