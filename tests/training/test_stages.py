"""Stages: each begins with the last one's result, patched from the true window; a kill anywhere loses nothing."""

import json

import pytest
import yaml

from ropecli.checkpoint.opening import open_checkpoint
from ropecli.errors import DataError, RecipeError, RopecliError
from ropecli.training.finetuning import Listener, run_stages
from ropecli.training.recipe_schema import make_recipe
from ropecli.training.stages import plan_stages

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
}
STAGES = [
    {"patch": {"method": "yarn", "factor": 2}, "length": 96},
    {"patch": {"method": "yarn", "factor": 4}, "length": 160, "steps": 3},
]


@pytest.fixture(scope="module")
def recipe_of(corpus, tmp_path_factory):
    """recipe_of(key=value, ...) -> the recipe of a file with these keys; options would hold in all stages."""
    path = tmp_path_factory.mktemp("recipes") / "recipe.yaml"

    def read(**keys):
        path.write_text(yaml.safe_dump({"data": str(corpus), **KEYS, "stages": STAGES, **keys}))
        return make_recipe(path, {})

    return read


@pytest.fixture(scope="module")
def staged(recipe_of, llama):
    """staged(output, key=value, ...) -> output, when all stages are done."""

    def run(output, *, checkpoint=llama, resume=False, on_step=lambda progress: None, said=None, **keys):
        say = said.append if said is not None else lambda message: None
        stages = plan_stages(open_checkpoint(checkpoint), recipe_of(**keys))
        run_stages(stages, output, resume=resume, listener=Listener(say, on_step))
        return output

    return run


@pytest.fixture(scope="module")
def finished(staged, tmp_path_factory):
    return staged(tmp_path_factory.mktemp("runs") / "finished")


def files(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_length_defaults_to_the_context_length_or_with_gaps_to_the_pretraining_length(recipe_of, patched_llama):
    def lengths(**keys):
        (stage,) = plan_stages(open_checkpoint(patched_llama), recipe_of(stages=[], **keys))
        return stage.length, stage.position_span

    assert lengths() == (128, 128)
    assert lengths(positions="pose") == (64, 128)
    assert lengths(positions="pose", window=512) == (64, 512)
    corrected = {"method": "yarn", "factor": 4, "original_length": 32}
    assert lengths(positions="pose", patch=corrected) == (32, 128)
    with pytest.raises(RecipeError, match=r"300 tokens into 128 positions"):
        lengths(length=300, positions="pose")


def test_stages_equal_patching_and_training_by_hand(finished, llama, recipe_of, tmp_path, weights_of, corpus):
    from ropecli.attention.patching import patch_to
    from ropecli.checkpoint.patch_plan import make_plan
    from ropecli.scaling.spec import make_spec

    source = llama
    for number, run in enumerate(recipe_of().runs, 1):
        patched, trained = tmp_path / f"{number}-patched", tmp_path / f"{number}"
        patch_to(make_plan(open_checkpoint(source), make_spec("yarn", 2.0 * number)), patched)
        run_stages(plan_stages(open_checkpoint(patched), run), trained)
        source = trained
    assert weights_of(finished) == weights_of(source)
    assert weights_of(finished / "stages" / "1") == weights_of(tmp_path / "1")
    assert json.loads((finished / "config.json").read_text()) == json.loads((source / "config.json").read_text())


def test_run_stopped_in_its_second_stage_resumes(staged, tmp_path, finished, weights_of):
    def stop(progress):
        if progress.step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        staged(tmp_path / "run", on_step=stop)
    run = staged(tmp_path / "run", resume=True)
    assert weights_of(run) == weights_of(finished)
    assert files(run) == files(finished)


def test_finished_run_is_not_run_again(staged, finished, weights_of, tmp_path):
    steps, said, before = [], [], files(finished)
    staged(finished, resume=True, on_step=steps.append, said=said)
    assert steps == []
    assert sum("already finished" in message for message in said) == 2
    assert files(finished) == before


def test_fault_in_a_later_stage_is_found_before_training(staged, tmp_path):
    first = STAGES[0]
    for stages, message in [
        ([first, {"patch": {"method": "yarn", "target_length": 32}}], "stage 2 of 2: .*below the pretraining length"),
        ([first, {"patch": {"method": "dynamic-yarn", "factor": 4}}], "stage 2 of 2: .*the current length"),
        ([{**first, "adapter": "lora", "save": "adapter"}, first], "stage 1 of 2: save: adapter"),
    ]:
        with pytest.raises(RopecliError, match=message):
            staged(tmp_path / "run", stages=stages)
        assert not (tmp_path / "run").exists()


def test_a_run_that_never_began_leaves_nothing(staged, tmp_path):
    with pytest.raises(DataError, match="No document"):
        staged(tmp_path / "run", stages=[{**STAGES[0], "length": 2**20}])
    assert not (tmp_path / "run").exists()


def test_another_checkpoint_and_changed_stages_are_refused_on_resume(staged, finished, large):
    one, two = STAGES
    with pytest.raises(RecipeError, match=r"source\.digest"):
        staged(finished, resume=True, checkpoint=large)
    with pytest.raises(RecipeError, match=r"recipe\.steps: 3 then, 4 now"):
        staged(finished, resume=True, stages=[one, {**two, "steps": 4}])
    with pytest.raises(RecipeError, match=r"recipe\.seed: 1 then, 2 now"):
        staged(finished, resume=True, stages=[one, two, two])
