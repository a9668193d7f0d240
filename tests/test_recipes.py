"""Every recipe can be used as it is, and explains each of its keys, and fits on eight GPUs."""

import json
import math
import re
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest
import yaml
from tiny_settings import LLAMA_2_7B

from ropecli.attention.patching import patch_to
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.training.recipe_schema import Patch, Recipe, RecipeSource, make_recipe
from ropecli.training.stages import describe, plan_stages

ROOT = Path(__file__).parent.parent / "recipes"
RECIPES = sorted((ROOT / "finetune").rglob("*.yaml"))
recipes = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SIZES += ("max_position_embeddings", "rope_theta", "vocab_size")


def config_of(model_type, *sizes, **others):
    return {"model_type": model_type, **dict(zip(SIZES, sizes, strict=True)), **others}


LLAMA_3_8B = config_of("llama", 4096, 14336, 32, 32, 8, 8192, 5e5, 128256)
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA_3_1 = {"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, **BANDS}}
LLAMA_3_1_8B = {**LLAMA_3_8B, **LLAMA_3_1}
QWEN_2_5_7B_INSTRUCT = config_of("qwen2", 3584, 18944, 28, 28, 4, 32768, 1e6, 152064)
QWEN_2_5_MATH_7B = config_of("qwen2", 3584, 18944, 28, 28, 4, 4096, 1e4, 152064)
QWEN_3_8B_BEFORE = config_of("qwen3", 4096, 12288, 36, 32, 8, 4096, 1e4, 151936, head_dim=128)
LAYERS = [*["sliding_attention"] * 3, "full_attention"]
OLMO_3_7B = config_of("olmo3", 4096, 11008, 32, 32, 32, 8192, 5e5, 100278, sliding_window=4096, layer_types=LAYERS * 8)
OLMO_3_32B = config_of("olmo3", 5120, 27648, 64, 40, 8, 8192, 5e5, 100278, sliding_window=4096, layer_types=LAYERS * 16)
NOPE = {"no_rope_layers": [1, 1, 1, 0] * 9, "tie_word_embeddings": True}
SMOLLM_3_STAGE_3 = config_of("smollm3", 2048, 11008, 36, 16, 4, 4096, 5e4, 128256, **NOPE)
MODELS = {
    **dict.fromkeys(
        ("yarn-64k", "yarn-128k", "pi-32k", "abf-llama2-long", "longlora-32k", "longalign-64k"), LLAMA_2_7B
    ),
    **dict.fromkeys(("pose-32k", "drope-recalibrate", "easycontext-1m"), LLAMA_2_7B),
    **dict.fromkeys(("prolong-64k", "prolong-512k"), LLAMA_3_8B),
    "ultralong-1m": LLAMA_3_1_8B,
    "qwen2.5-yarn-128k": QWEN_2_5_7B_INSTRUCT,
    "16k-for-reasoning": QWEN_2_5_MATH_7B,
    "qwen3-128k": QWEN_3_8B_BEFORE,
    "longmino": OLMO_3_7B,
    "olmo3-32b": OLMO_3_32B,
    "smollm3-64k": SMOLLM_3_STAGE_3,
}
"""The model that each recipe is for."""
QUICK = ("yarn-64k", "qwen2.5-yarn-128k", "smollm3-64k")
"""Recipes whose estimates the default run makes."""


@recipes
def test_recipe_is_valid_and_names_its_source(path):
    text = path.read_text(encoding="utf-8")
    recipe = make_recipe(path, {})
    assert recipe.model_dump(mode="json", exclude_unset=True) == yaml.safe_load(text)
    for stage, run in zip(recipe.stages, recipe.runs, strict=False):
        whole = run.model_dump(mode="json", exclude_unset=True)
        assert {key: whole[key] for key in stage} == stage
        assert whole.keys() <= Recipe.model_fields.keys()
    assert re.search(r"arXiv:\d{4}\.\d{5}|https://github\.com/[\w-]+/[\w-]+", _header(path)), "its source"


def _header(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    return "\n".join(takewhile(lambda line: line.startswith("#"), lines))


def test_index_links_every_recipe():
    links = re.findall(r"\]\(([\w/.-]+\.yaml)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert {ROOT / link for link in links} == set(ROOT.rglob("*.yaml"))
    assert {path.stem for path in RECIPES} == {*MODELS, "demo", "extend"}


def test_a_dry_run_describes_every_stage(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_2_7B))
    stages = plan_stages(open_checkpoint(tmp_path), make_recipe(ROOT / "finetune" / "yarn-128k.yaml", {}))
    first, second = describe(stages, 8)
    for part in ("yarn ×16 to 65,536 tokens", "400 steps", "4,194,304 tokens per step"):
        assert part in first
    for part in ("yarn ×32 to 131,072 tokens", "sequences of 65,536 tokens", "200 steps"):
        assert part in second


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in MODELS]
)
def test_recipe_fits_on_eight_gpus(name, tmp_path):
    """On eight GPUs of 80 GB, in every stage, patched as it says, by FSDP2, which does not refuse it."""
    from transformers import AutoConfig

    from ropecli.training.launch import Launch, launch_faults
    from ropecli.training.memory_plan.estimate import MemoryEstimator

    path = ROOT / "finetune" / f"{name}.yaml"
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]))
    estimator = MemoryEstimator(AutoConfig.from_pretrained(tmp_path))
    for stage in plan_stages(open_checkpoint(tmp_path), make_recipe(path, {})):
        launch = Launch("fsdp2", 8, stage.recipe.context_parallel_size)
        assert list(launch_faults(launch, estimator.model, stage.recipe, stage.length)) == []
        assert estimator.estimate(stage.recipe, stage.length, launch).total < 80 * 10**9


def test_longmino_scales_the_layers_with_full_attention_alone(build, live, tmp_path):
    """On a tiny model, by the formula of the authors' olmo_core/nn/rope.py, in float64."""
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4096}
    source = build("olmo3", max_position_embeddings=8192, rope_parameters=None, **layers)
    (stage,) = plan_stages(open_checkpoint(source), make_recipe(ROOT / "finetune" / "longmino.yaml", {}))
    patch_to(stage.plan, tmp_path / "patched")
    tables = live(tmp_path / "patched")
    pairs = len(tables["sliding_attention"].inv_freq)
    plain = 500000.0 ** -(np.arange(pairs) / pairs)
    low, high = (pairs * math.log(8192 / (2 * math.pi * rotations)) / math.log(500000) for rotations in (32, 1))
    ramp = np.clip((np.arange(pairs) - math.floor(low)) / (math.ceil(high) - math.floor(low)), 0, 1)
    np.testing.assert_allclose(tables["sliding_attention"].inv_freq, plain, rtol=2e-6)
    np.testing.assert_allclose(tables["full_attention"].inv_freq, plain * (1 - ramp * 7 / 8), rtol=2e-6)
    factors = [tables[layer].attention_factor for layer in layers["layer_types"]]
    assert factors == pytest.approx([1, 0.1 * math.log(8) + 1])


def test_index_explains_every_key():
    from pydantic_core import PydanticUndefined

    index = (ROOT / "README.md").read_text(encoding="utf-8")
    for kind, elsewhere in ((Recipe, ()), (RecipeSource, {*Recipe.model_fields} - {"data"}), (Patch, ())):
        table = ["| key | default | meaning |", "| --- | --- | --- |"]
        for name, field in kind.model_fields.items():
            empty = field.default in (None, (), PydanticUndefined)
            default = "" if empty else yaml.safe_dump(field.default, default_flow_style=True).splitlines()[0]
            if name not in elsewhere:
                table.append(f"| `{name}` | {default} | {field.description} |")
        assert "\n".join(table) in index, table
