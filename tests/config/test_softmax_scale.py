"""DeepSeek's pair mscale, mscale_all_dim: its attention multiplies its softmax scale, beside what cos and sin get.

A new patch keeps the model's own temperature under yarn, and no part of it under another method.
"""

import math

import pytest
from tiny_settings import LATENT, TINY
from transformers import AutoConfig, AutoModelForCausalLM

from ropecli.checkpoint.opening import open_checkpoint
from ropecli.checkpoint.patch_plan import make_plan
from ropecli.checkpoint.state import read_state
from ropecli.scaling.spec import make_spec

SHIPPED = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
SMALL = {
    **TINY,
    **LATENT,
    "max_position_embeddings": 163840,
    "qk_rope_head_dim": 64,
    "rope_theta": 10000,
    "rope_scaling": SHIPPED,
}


@pytest.fixture
def model(written):
    """(folder of the model as shipped, its plain softmax scale)"""
    folder = written({**SMALL, "model_type": "deepseek_v3"})
    return folder, (SMALL["qk_nope_head_dim"] + SMALL["qk_rope_head_dim"]) ** -0.5


def softmax_scale(folder) -> float:
    """The same for every attention, in the model that stock transformers builds."""
    import torch

    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    scales = {module.scaling for module in built.modules() if type(module).__name__.endswith("Attention")}
    assert len(scales) == 1
    return scales.pop()


def times(factor: float) -> float:
    """What the pair makes of the softmax scale, with mscale_all_dim 1."""
    return (0.1 * math.log(factor) + 1) ** 2


def test_as_shipped_the_temperature_is_in_the_softmax_scale_alone(model, live):
    folder, plain = model
    ropes = read_state(open_checkpoint(folder)).ropes
    assert ropes[None].attention_factor == live(folder)[None].attention_factor == 1.0
    assert softmax_scale(folder) == pytest.approx(plain * times(40))


@pytest.mark.parametrize("factor", [4.0, 64.0])
def test_yarn_keeps_the_pair_and_counts_it_by_its_own_factor(factor, model, patched, live):
    folder, plain = model
    again = patched(folder, "yarn", factor)
    assert live(again)[None].attention_factor == 1.0
    assert softmax_scale(again) == pytest.approx(plain * times(factor))


@pytest.mark.parametrize("method", ["unscaled", "linear", "longrope"])
def test_another_method_leaves_the_softmax_scale_plain(method, model, patched, live, config_of):
    folder, plain = model
    lists = {"long_factor": [2.0] * 32, "attention_factor": 1.1}
    again = patched(folder, method, 8.0, **(lists if method == "longrope" else {}))
    assert softmax_scale(again) == pytest.approx(plain)
    assert live(again)[None].attention_factor == pytest.approx(1.1 if method == "longrope" else 1.0)
    for dialect in ("rope_parameters", "rope_scaling"):
        assert not {"mscale", "mscale_all_dim"} & set(config_of(again)[dialect] or ())


@pytest.mark.parametrize("first", ["yarn", "linear"])
def test_two_patches_are_one(first, model, patched, config_of):
    """linear drops the pair from config.json; the note knows it."""
    folder, plain = model
    twice = patched(patched(folder, first, 8.0), "yarn", 64.0)
    assert config_of(twice) == config_of(patched(folder, "yarn", 64.0))
    assert softmax_scale(twice) == pytest.approx(plain * times(64))


def test_a_pair_for_a_model_that_does_not_read_it_is_warned_of(model, llama):
    """cos and sin get nothing then, and the softmax neither: YaRN without its temperature."""
    spec = make_spec("yarn", 8.0, {"mscale": 0.707, "mscale_all_dim": 0.707})
    warnings = make_plan(open_checkpoint(llama), spec).warnings
    assert any("mscale_all_dim" in warning and "llama" in warning for warning in warnings)
    assert not any("mscale_all_dim" in warning for warning in make_plan(open_checkpoint(model[0]), spec).warnings)
