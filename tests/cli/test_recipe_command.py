"""`ropecli recipe`: the recipes that come with ropecli, and the schema by which editors check one."""

import json
import re
from pathlib import Path

import yaml

import ropecli as package
from ropecli.training.settings import Recipe, recipe_path

RECIPES = Path(__file__).parents[2] / "recipes"


def test_all_are_listed_each_with_a_sentence(ropecli):
    listed = json.loads(ropecli("recipe", "--json").out)
    assert {(one["kind"], one["name"]) for one in listed} == {
        (path.parent.name, path.stem) for path in RECIPES.rglob("*.yaml")
    }
    shown = ropecli("recipe").out
    for one in listed:
        assert re.fullmatch(r"[A-Z1-9].*\.", one["summary"])
        assert one["name"] in shown


def test_one_is_printed_as_it_is_or_by_its_path(ropecli, monkeypatch):
    file = RECIPES / "finetune" / "qwen2.5-yarn-128k.yaml"
    assert ropecli("recipe", file.stem).out == file.read_text(encoding="utf-8")
    assert package.recipe(file.stem).recipes[0].text == file.read_text(encoding="utf-8")
    monkeypatch.setenv("RANK", "1")  # as on the second node of some clusters
    assert Path(ropecli("recipe", "--path", "2-nodes").out.strip()).samefile(RECIPES / "accelerate" / "2-nodes.yaml")


def test_a_path_is_not_taken_for_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").write_text("data: demo-train\n")
    assert recipe_path(Path("yarn-64k")).samefile(RECIPES / "finetune" / "yarn-64k.yaml")
    for path in ("yarn-64k.yaml", "recipes/yarn-64k", "mine"):
        assert recipe_path(Path(path)) == Path(path)


def test_the_schema_knows_every_key_and_token_counts_with_suffixes(ropecli):
    schema = json.loads(ropecli("recipe", "--schema").out)
    assert schema["properties"].keys() == Recipe.model_fields.keys()
    assert schema["additionalProperties"] is False
    assert schema["properties"]["stages"]["items"] == {"$ref": "#"}
    number, text, _ = schema["properties"]["length"]["anyOf"]
    assert (number["type"], text["type"]) == ("integer", "string")
    assert re.search(text["pattern"], "64k")
    for path in (RECIPES / "finetune").glob("*.yaml"):
        assert yaml.safe_load(path.read_text(encoding="utf-8")).keys() <= schema["properties"].keys()
