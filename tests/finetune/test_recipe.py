"""Recipes: every fault is named at once, options come before the file, and nothing unknown passes."""

import math

import pytest

from ropecli.errors import RecipeError
from ropecli.finetune.recipe import Recipe, make_recipe


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
    faults = [line.strip().split(":")[0] for line in message.splitlines() if line.startswith("  ")]
    assert sorted(faults) == ["batch_size", "data", "learning_rate", "lenght", "schedule", "steps"]
    assert all(key in message.splitlines()[-1] for key in Recipe.model_fields)


BOUNDS = {
    "length": [1, 0, -5, 2.5, "long"],
    "steps": [0, -1, 1.5],
    "batch_size": [0],
    "gradient_accumulation": [0],
    "learning_rate": [0, -1e-3, math.nan, math.inf, "fast"],
    "warmup_steps": [-1],
    "betas": [[0.9], [0.9, 0.95, 0.99], [1.0, 0.9], [0.9, 1.0], [-0.1, 0.9], [0.9, math.nan], "high"],
    "weight_decay": [-0.1, math.nan],
    "max_grad_norm": [0, -1, math.nan],
    "mixed_precision": ["fp8"],
    "save_every": [0],
    "keep_checkpoints": [0],
    "max_documents": [0],
    "seed": [-1, 2**64],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in BOUNDS.items() for value in values])
def test_a_value_out_of_bounds_is_refused(key, value):
    with pytest.raises(RecipeError, match=rf"1 fault\(s\):\n  {key}"):
        make_recipe(None, {"data": "corpus", key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [("length", 2), ("warmup_steps", 0), ("weight_decay", 0), ("betas", [0.0, 0.0]), ("seed", 2**31), ("steps", 1)],
)
def test_a_value_at_its_bound_is_taken(key, value):
    make_recipe(None, {"data": "corpus", key: value})


@pytest.mark.parametrize("value", ["bf16", "none"])
def test_a_precision_means_in_a_file_what_it_means_as_an_option(recipe_file, value):
    """YAML reads some words as true and false."""
    from ropecli.cli.terminal import parse_settings

    path = recipe_file(f"data: corpus\nmixed_precision: {value}\n")
    assert make_recipe(path, {}).mixed_precision == value
    assert make_recipe(None, {"data": "x", **parse_settings([f"mixed_precision={value}"])}).mixed_precision == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- data: corpus", "list"),
        ("", "mapping"),
        ("just words", "mapping"),
        ("1: 2\ndata: corpus", "key"),
        ("data: [unclosed", "YAML"),
        (b"data: \xff", "YAML"),
        ("data: !!python/object/apply:os.getcwd []", "YAML"),
        ("data: corpus\nsteps: 3\nsteps: 4", "steps"),
    ],
    ids=["a list", "nothing", "a word", "a number for a key", "broken", "not UTF-8", "code", "a key given twice"],
)
def test_a_file_that_is_no_recipe_is_refused(recipe_file, text, message):
    with pytest.raises(RecipeError, match=message):
        make_recipe(recipe_file(text), {})


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"absent\.yaml"):
        make_recipe(tmp_path / "absent.yaml", {})
