"""Recipes: every fault is named at once, options come before the file, and nothing unknown passes."""

import json
import math

import pytest

from ropecli.cli.terminal import parse_settings
from ropecli.errors import RecipeError
from ropecli.training.recipe import Recipe, make_recipe


@pytest.fixture
def recipe_file(tmp_path):
    def write(text):
        path = tmp_path / "recipe.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_a_file_gives_the_keys_it_names_and_defaults_for_the_others(recipe_file):
    recipe = make_recipe(recipe_file("data: corpus\nlearning_rate: 2e-5\nbetas: [0.8, 0.9]\nsteps: 7\n"), {})
    assert recipe == Recipe(data="corpus", learning_rate=2e-5, betas=(0.8, 0.9), steps=7)


def test_options_come_before_the_file(recipe_file):
    path = recipe_file("data: corpus\nsteps: 7\nseed: 5\n")
    recipe = make_recipe(path, {"steps": 9, "data": "other", "seed": None, "length": None})
    assert (recipe.steps, recipe.data, recipe.seed, recipe.length) == (9, "other", 5, None)


def test_all_faults_are_listed_at_once(recipe_file):
    path = recipe_file("lenght: 3\nsteps: 0\nlearning_rate: .nan\nschedule: linear\n")
    with pytest.raises(RecipeError) as caught:
        make_recipe(path, {"batch_size": -1})
    message = str(caught.value)
    assert str(path) in message
    faults = [line.strip().split(":")[0] for line in message.splitlines()[1:]]
    assert sorted(faults) == ["batch_size", "learning_rate", "lenght", "schedule", "steps"]
    assert "Did you mean 'length'?" in message


BOUNDS = {
    "length": [1, -5, 2.5, "long"],
    "steps": [0, 1.5],
    "batch_size": [0],
    "gradient_accumulation": [0],
    "learning_rate": [0, -1e-3, math.nan, math.inf, "fast"],
    "warmup_steps": [-1],
    "betas": [[0.9], [0.9, 0.95, 0.99], [1.0, 0.9], [-0.1, 0.9], [0.9, math.nan], "high"],
    "weight_decay": [-0.1, math.nan],
    "max_grad_norm": [0, math.nan],
    "mixed_precision": ["fp8"],
    "save_every": [0],
    "keep_checkpoints": [0],
    "max_documents": [0],
    "seed": [-1, 2**64],
}


def test_a_value_out_of_bounds_is_refused_and_one_at_its_bound_is_taken():
    for key, values in BOUNDS.items():
        for value in values:
            with pytest.raises(RecipeError, match=rf"Invalid recipe[^\n]*:\n  {key}[^\n]*$"):
                make_recipe(None, {"data": "corpus", key: value})
    bounds = {"length": 2, "warmup_steps": 0, "weight_decay": 0, "betas": [0.0, 0.0], "seed": 2**31, "steps": 1}
    make_recipe(None, {"data": "corpus", **bounds})


def test_a_value_is_read_as_in_yaml_1_2_in_a_file_and_as_an_option(recipe_file):
    for text, value in [
        ("1:30", "1:30"),
        ("0100", 100),
        ("0o17", 15),
        ("0x1f", 31),
        ("1_000", "1_000"),
        ("5e5", 5e5),
        ("1.", 1.0),
        ("-.5", -0.5),
        ("-.inf", -math.inf),
        ("1e", "1e"),
        ("TRUE", True),
        ("no", "no"),
        ("on", "on"),
        ("none", "none"),
        ("null", None),
        ("2026-11-22", "2026-11-22"),
        ("[1:30, 0100]", ["1:30", 100]),
        ("'0100'", "0100"),
    ]:
        path = recipe_file(f"data: corpus\npatch: {{method: yarn, params: {{key: {text}}}}}\n")
        for read in (make_recipe(path, {}).patch.params["key"], parse_settings([f"key={text}"])["key"]):
            assert (type(read), read) == (type(value), value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- data: corpus", "list"),
        ("", "mapping"),
        ("1: 2\ndata: corpus", "Keys should be strings"),
        ("data: [unclosed", "YAML"),
        ("data: !!python/object/apply:os.getcwd []", "YAML"),
        ("data: corpus\nsteps: 3\nsteps: 4", "steps"),
        ("[" * 5000, "YAML"),
        ("# " + "long " * 2**18, "it is larger than 1024 KiB"),
    ],
    ids=[
        *("a list", "nothing", "a number for a key", "broken", "code", "a key given twice"),
        *("nested without end", "too long"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(recipe_file, text, message):
    with pytest.raises(RecipeError, match=message):
        make_recipe(recipe_file(text), {})


MIXTURE = [{"data": "books", "weight": 3, "sequences": "packed"}, {"data": "code"}]


NOT_WHOLE = {
    "no data": ({}, "either data or mixture"),
    "data twice": ({"data": "corpus", "mixture": MIXTURE}, "either data or mixture"),
    "an empty mixture": ({"mixture": []}, "either data or mixture"),
    "a source's key beside a mixture": ({"mixture": MIXTURE, "split": "train"}, "set split in each source"),
    "a key that no source has": ({"mixture": [{"data": "a", "wieght": 2}]}, r"mixture\.0\.wieght"),
    "a source without weight": ({"mixture": [{"data": "a", "weight": 0}]}, r"mixture\.0\.weight"),
    "gaps in packed documents": ({"mixture": MIXTURE, "positions": "pose"}, "cannot be combined"),
    "offloading what is not kept": (
        {"data": "a", "offload_activations": True, "gradient_checkpointing": False},
        "gradient_checkpointing",
    ),
    "short documents that none is shorter than": ({"data": "a", "keep_short": 0.5}, "long_from"),
    "an adapter's file without one": ({"data": "a", "save": "adapter"}, "needs an adapter"),
    "a patch without a method": ({"data": "a", "patch": {"factor": 2}}, r"patch\.method"),
    "stages of stages": ({"data": "a", "stages": [{"stages": []}]}, r"stages\.0: a stage cannot have stages"),
    "a fault in a stage": ({"data": "a", "stages": [{"steps": 1}, {"steps": 0}]}, r"stages\.1\.steps"),
    "a stage without data": ({"stages": [{"data": "a"}, {"steps": 3}]}, r"stages\.1: .*either data or mixture"),
    "a stage that is no mapping": ({"data": "a", "stages": [3]}, r"stages\.0"),
}


@pytest.mark.parametrize(("values", "message"), NOT_WHOLE.values(), ids=NOT_WHOLE.keys())
def test_keys_that_do_not_go_together_are_refused(recipe_file, values, message):
    with pytest.raises(RecipeError, match=message):
        make_recipe(recipe_file(json.dumps(values)), {})


def test_a_stage_takes_over_what_it_does_not_set(recipe_file):
    stages = [{"steps": 5, "length": 64}, {"mixture": MIXTURE, "seed": 9}, {"data": "other"}]
    values = {"data": "corpus", "split": "train", "seed": 3, "steps": 7, "stages": stages}
    recipe = make_recipe(recipe_file(json.dumps(values)), {})
    runs = recipe.runs
    assert [(run.steps, run.length, run.seed) for run in runs] == [(5, 64, 3), (7, None, 9), (7, None, 5)]
    assert [run.sources[0].data for run in runs] == ["corpus", "books", "other"]
    assert [run.sources[0].split for run in runs] == ["train", None, None]  # text of its own has keys of its own
    assert not any(run.stages for run in runs)
    assert make_recipe(None, {"data": "corpus"}).runs == (make_recipe(None, {"data": "corpus"}),)


def test_an_option_holds_in_every_stage(recipe_file):
    path = recipe_file("data: corpus\nsteps: 7\nstages:\n  - steps: 400\n  - steps: 200\n    length: 64\n")
    assert [(run.steps, run.length) for run in make_recipe(path, {"steps": 2}).runs] == [(2, None), (2, 64)]
