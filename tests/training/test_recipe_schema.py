"""Recipes: all faults are listed at once, options override the file, and unknown keys are refused."""

import json
import math

import pytest

from ropecli.cli.typer_command import parse_settings
from ropecli.errors import RecipeError
from ropecli.training.recipe_schema import make_recipe


@pytest.fixture
def recipe_file(tmp_path):
    def write(text):
        path = tmp_path / "recipe.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_all_faults_are_listed_at_once(recipe_file):
    path = recipe_file("lenght: 3\nepochs: 3\nsteps: 0\nlearning_rate: .nan\nschedule: step\n")
    with pytest.raises(RecipeError) as caught:
        make_recipe(path, {"batch_size": -1})
    message = str(caught.value)
    assert str(path) in message
    faults = [line.strip().split(":")[0] for line in message.splitlines()[1:]]
    assert sorted(faults) == ["batch_size", "epochs", "learning_rate", "lenght", "schedule", "steps"]
    assert "epochs: Extra inputs are not permitted. Use --steps: training is counted in them." in message
    assert "Did you mean 'length'?" in message


def test_values_are_read_as_yaml_1_2_in_a_file_and_as_an_option(recipe_file):
    for text, value in [
        ("1:30", "1:30"),
        ("0100", 100),
        ("1_000", "1_000"),
        ("5e5", 5e5),
        ("-.inf", -math.inf),
        ("1e", "1e"),
        ("no", "no"),
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
        ("data: [unclosed", "cannot be read"),
        ("data: !!python/object/apply:os.getcwd []", "cannot be read"),
        ("data: corpus\nsteps: 3\nsteps: 4", "steps"),
    ],
    ids=["a list", "broken", "code", "a key given twice"],
)
def test_file_that_is_no_recipe_is_refused(recipe_file, text, message):
    with pytest.raises(RecipeError, match=message):
        make_recipe(recipe_file(text), {})


MIXTURE = [{"data": "books", "weight": 3, "sequences": "packed"}, {"data": "code"}]


WRONG = {
    "no data": ({}, "data is missing, or mixture"),
    "data twice": ({"data": "corpus", "mixture": MIXTURE}, "data is missing, or mixture"),
    "a source's key beside a mixture": ({"mixture": MIXTURE, "split": "train"}, "set split in each source"),
    "gaps in packed documents": ({"mixture": MIXTURE, "positions": "pose"}, "cannot be combined"),
    "short documents that none is shorter than": ({"data": "a", "keep_short": 0.5}, "long_from"),
    "an adapter's file without one": ({"data": "a", "save": "adapter"}, "save applies only to adapter lora, "),
    "a window without gaps": ({"data": "a", "window": 64}, "window applies only to positions pose, randomized"),
    "measuring on nothing": ({"data": "a", "eval_every": 3}, "eval_every has no effect without eval_data"),
    "a key that has an effect in no stage": (
        {"data": "a", "window": 64, "stages": [{"steps": 1}, {"steps": 2}]},
        "window: it has no effect in any stage",
    ),
    "null where a number must be": ({"data": "a", "lora_rank": None}, "lora_rank: Input should be a valid integer"),
    "stages of stages": ({"data": "a", "stages": [{"stages": []}]}, r"stages\.0: a stage cannot have stages"),
    "a fault in a stage": ({"data": "a", "stages": [{"steps": 1}, {"steps": 0}]}, r"stages\.1\.steps"),
}


@pytest.mark.parametrize(("values", "message"), WRONG.values(), ids=WRONG)
def test_keys_that_cannot_be_combined_are_refused(recipe_file, values, message):
    with pytest.raises(RecipeError, match=message):
        make_recipe(recipe_file(json.dumps(values)), {})


def test_stage_inherits_the_keys_that_it_does_not_set(recipe_file):
    mixture = [{**part, "sequences": None} for part in MIXTURE]
    stages = [{"steps": 5, "length": 64}, {"mixture": mixture, "seed": 9, "positions": "pose"}, {"data": "other"}]
    values = {"data": "corpus", "split": "train", "seed": 3, "steps": 7, "stages": stages}
    recipe = make_recipe(recipe_file(json.dumps({**values, "pose_chunks": 3, "window": 64})), {})
    runs = recipe.runs
    assert [run.window for run in runs] == [None, 64, None]  # where it has an effect
    assert make_recipe(recipe_file(json.dumps(recipe.record())), {}) == recipe
    assert [(run.steps, run.length, run.seed) for run in runs] == [(5, 64, 3), (7, None, 9), (7, None, 5)]
    assert [run.sources[0].data for run in runs] == ["corpus", "books", "other"]
    assert [run.sources[0].split for run in runs] == ["train", None, None]  # text of its own has keys of its own
    assert not any(run.stages for run in runs)


def test_option_overrides_the_file_in_every_stage(recipe_file):
    path = recipe_file("data: corpus\nsteps: 7\nstages:\n  - steps: 400\n  - steps: 200\n    length: 64\n")
    assert [(run.steps, run.length) for run in make_recipe(path, {"steps": 2}).runs] == [(2, None), (2, 64)]


def test_null_as_an_option_takes_the_default_in_every_stage(recipe_file):
    path = recipe_file("data: corpus\nlength: 64\nstages:\n  - steps: 4\n  - length: 128\n")
    runs = make_recipe(path, {"length": None, "steps": None}).runs
    assert [(run.length, run.steps) for run in runs] == [(None, 100), (None, 100)]
    with pytest.raises(RecipeError, match="lenght: Extra inputs"):
        make_recipe(path, {"lenght": None})


@pytest.mark.parametrize(("key", "value", "names"), [("data", "own", ["own"]), ("mixture", MIXTURE, ["books"])])
def test_data_and_mixture_override_each_other_in_every_stage(recipe_file, key, value, names):
    for kept in ({"data": "corpus"}, {"mixture": MIXTURE}):
        values = {**kept, "stages": [{"steps": 1}, {"data": "other"}, {"mixture": MIXTURE}]}
        runs = make_recipe(recipe_file(json.dumps(values)), {key: value}).runs
        assert [[source.data for source in run.sources][:1] for run in runs] == [names] * 3
