"""Every recipe can be used as it is, and explains each of its keys."""

from pathlib import Path

import pytest
import yaml

from ropecli.finetune.recipe import Recipe, make_recipe

ROOT = Path(__file__).parent.parent / "recipes"
RECIPES = sorted(ROOT.rglob("*.yaml"))
recipes = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.relative_to(ROOT).as_posix())


def test_there_are_recipes():
    assert RECIPES
    assert not list(ROOT.rglob("*.yml"))


@recipes
def test_a_recipe_loads_with_every_value_it_names(path):
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    recipe = make_recipe(path, {}).model_dump(mode="json")
    assert {key: recipe[key] for key in values} == values
    assert recipe.keys() == Recipe.model_fields.keys()


@recipes
def test_a_recipe_begins_with_what_it_is_and_its_source(path):
    header = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        header.append(line)
    assert "arXiv:" in "".join(header)


@recipes
def test_every_key_of_a_recipe_has_a_comment_above_it_or_at_its_side(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    bare = []
    for number, line in enumerate(lines):
        if line and not line.startswith(("#", " ", "-")):
            above = number > 0 and lines[number - 1].lstrip().startswith("#")
            if not above and " #" not in line:
                bare.append(line.split(":")[0])
    assert bare == []


@recipes
def test_the_index_names_the_recipe(path):
    assert path.relative_to(ROOT).as_posix() in (ROOT / "README.md").read_text(encoding="utf-8")
