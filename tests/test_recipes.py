"""Every recipe can be used as it is, and explains each of its keys; dry runs reach the windows of its source."""

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

LLAMA_3_8B = {
    **LLAMA_2_7B,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
LLAMA_3_1_8B = {
    **LLAMA_3_8B,
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
QWEN_2_5_7B_INSTRUCT = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "vocab_size": 152064,
}
OLMO_3_7B = {
    "model_type": "olmo3",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 8192,
    "rope_theta": 500000,
    "rope_scaling": None,
    "sliding_window": 4096,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8,
    "vocab_size": 100278,
}
OLMO_3_32B = {
    **OLMO_3_7B,
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 16,
}
QWEN_2_5_MATH_7B = {
    **QWEN_2_5_7B_INSTRUCT,
    "max_position_embeddings": 4096,
    "rope_theta": 10000,
    "sliding_window": 4096,
}
QWEN_3_8B_BEFORE = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "head_dim": 128,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "rope_theta": 10000,
    "vocab_size": 151936,
}
SMOLLM_3_STAGE_3 = {
    "model_type": "smollm3",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "rope_theta": 50000,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
K = 1024
# The model, and of each stage on eight processes: method, factor, rope_theta, window, length,
# steps, tokens per step.
EXPECTED = {
    "yarn-64k": (LLAMA_2_7B, [("yarn", 16, 1e4, 64 * K, 64 * K, 400, 64 * 64 * K)]),
    "yarn-128k": (
        LLAMA_2_7B,
        [
            ("yarn", 16, 1e4, 64 * K, 64 * K, 400, 64 * 64 * K),
            ("yarn", 32, 1e4, 128 * K, 64 * K, 200, 64 * 64 * K),
        ],
    ),
    "pi-32k": (LLAMA_2_7B, [("linear", 8, 1e4, 32 * K, 32 * K, 1000, 128 * 32 * K)]),
    "abf-llama2-long": (LLAMA_2_7B, [("abf", 8, 5e5, 32 * K, 32 * K, 1000, 4 * K * K)]),
    "longlora-32k": (LLAMA_2_7B, [("linear", 8, 1e4, 32 * K, 32 * K, 1000, 64 * 32 * K)]),
    "longalign-64k": (LLAMA_2_7B, [("abf", 16, 2e6, 64 * K, 64 * K, 1750, 8 * 64 * K)]),
    "pose-32k": (LLAMA_2_7B, [("yarn", 8, 1e4, 32 * K, 4 * K, 1000, 64 * 4 * K)]),
    "drope-recalibrate": (LLAMA_2_7B, [("nope", 8, 1e4, 32 * K, 4 * K, 5000, 512 * 4 * K)]),
    "qwen2.5-yarn-128k": (QWEN_2_5_7B_INSTRUCT, [("yarn", 4, 1e6, 128 * K, 128 * K, 200, 16 * 128 * K)]),
    "prolong-64k": (LLAMA_3_8B, [("abf", 8, 8e6, 64 * K, 64 * K, 5000, 4 * K * K)]),
    "prolong-512k": (
        LLAMA_3_8B,
        [
            ("abf", 8, 8e6, 64 * K, 64 * K, 5000, 4 * K * K),
            ("abf", 64, 128e6, 512 * K, 512 * K, 2500, 8 * K * K),
        ],
    ),
    "longmino": (OLMO_3_7B, [("yarn", 8, 5e5, 64 * K, 64 * K, 11921, 64 * 64 * K)]),
    "olmo3-32b": (OLMO_3_32B, [("yarn", 8, 5e5, 64 * K, 64 * K, 11921, 128 * 64 * K)]),
    "qwen3-128k": (QWEN_3_8B_BEFORE, [("abf", 8, 1e6, 32 * K, 32 * K, 5000, 128 * 32 * K)]),
    "smollm3-64k": (
        SMOLLM_3_STAGE_3,
        [
            ("abf", 8, 2e6, 32 * K, 32 * K, 20000, 72 * 32 * K),
            ("abf", 16, 5e6, 64 * K, 64 * K, 23842, 32 * 64 * K),
        ],
    ),
    "16k-for-reasoning": (QWEN_2_5_MATH_7B, [("abf", 4, 4e4, 16 * K, 16 * K, 500, 64 * 16 * K)]),
    "ultralong-1m": (LLAMA_3_1_8B, [("yarn", 128, 5e5, K * K, K * K, 120, 8 * K * K)]),
    "easycontext-1m": (
        LLAMA_2_7B,
        [
            ("abf", 8, 1e6, 32 * K, 32 * K, 1000, K * K),
            ("abf", 16, 5e6, 64 * K, 64 * K, 1000, K * K),
            ("abf", 62.5, 1e7, 256_000, 256_000, 500, 1_024_000),
            ("abf", 62.5, 25e6, 256_000, 256_000, 500, 1_024_000),
            ("abf", 62.5, 5e7, 256_000, 256_000, 150, 1_024_000),
            ("abf", 125, 1e8, 512_000, 512_000, 300, 1_024_000),
            ("abf", 125, 25e7, 512_000, 512_000, 90, 1_024_000),
        ],
    ),
}


@pytest.fixture
def bare(tmp_path):
    """bare(config) -> a checkpoint that is a config.json alone."""

    def write(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return open_checkpoint(tmp_path)

    return write


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
    assert {path.stem for path in RECIPES} == {*EXPECTED, "demo", "extend"}


@pytest.mark.parametrize("name", EXPECTED)
def test_dry_run_has_the_numbers_of_the_source(bare, name):
    config, expected = EXPECTED[name]
    stages = plan_stages(bare(config), make_recipe(ROOT / "finetune" / f"{name}.yaml", {}))
    actual = [
        (
            stage.plan.spec.method.name,
            stage.plan.spec.factor,
            stage.plan.positions.main.rope_theta,
            stage.plan.positions.context_length,
            stage.length,
            stage.recipe.steps,
            stage.tokens_per_step(8),
        )
        for stage in stages
    ]
    assert actual == expected
    assert [stage.position_span for stage in stages] == [target for _, _, _, target, *_ in expected]
    for sentence, (method, _, _, target, _, steps, tokens) in zip(describe(stages, 8), expected, strict=True):
        for part in (method, f"{target:,} tokens", f"{steps:,} steps", f"{tokens:,} tokens per step"):
            assert part in sentence


@pytest.mark.parametrize("name", EXPECTED)
def test_recipe_fits_on_eight_gpus(name, tmp_path):
    """On eight GPUs of 80 GB, in every stage, by the engine that it names, which does not refuse it."""
    from transformers import AutoConfig

    from ropecli.training.launch import Launch
    from ropecli.training.memory_plan.estimate import MemoryEstimator
    from ropecli.training.refusals import launch_faults

    path = ROOT / "finetune" / f"{name}.yaml"
    config = EXPECTED[name][0]
    (tmp_path / "config.json").write_text(json.dumps(config))
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
