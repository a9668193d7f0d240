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

PAIR = {"mscale": 1.0, "mscale_all_dim": 1.0}
SHIPPED = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, **PAIR}
SMALL = {**TINY, **LATENT, "qk_rope_head_dim": 64, "max_position_embeddings": 163840, "rope_theta": 10000}


@pytest.fixture
def model(written):
    """(folder of the model as shipped, its plain softmax scale)"""
    folder = written({**SMALL, "model_type": "deepseek_v3", "rope_scaling": SHIPPED})
    return folder, (SMALL["qk_nope_head_dim"] + SMALL["qk_rope_head_dim"]) ** -0.5


def softmax_scale(folder) -> float:
    """The same for every attention, in the model that stock transformers builds."""
    import torch

    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    scales = {module.scaling for module in built.modules() if type(module).__name__.endswith("Attention")}
    assert len(scales) == 1
    return scales.pop()


def test_yarn_keeps_the_pair_and_scales_the_softmax_by_its_own_factor(model, patched, live):
    folder, plain = model
    for checkpoint, factor in ((folder, 40), (patched(folder, "yarn", 64.0), 64)):
        rope = read_state(open_checkpoint(checkpoint)).positions.ropes[None]
        assert rope.attention_factor == live(checkpoint)[None].attention_factor == 1.0
        assert softmax_scale(checkpoint) == pytest.approx(plain * (0.1 * math.log(factor) + 1) ** 2)


@pytest.mark.parametrize("method", ["unscaled", "longrope"])
def test_another_method_leaves_the_softmax_scale_plain(method, model, patched, live, config_of):
    folder, plain = model
    lists = {"long_factor": [2.0] * 32, "attention_factor": 1.1}
    again = patched(folder, method, 8.0, **(lists if method == "longrope" else {}))
    assert softmax_scale(again) == pytest.approx(plain)
    assert live(again)[None].attention_factor == pytest.approx(1.1 if method == "longrope" else 1.0)
    for dialect in ("rope_parameters", "rope_scaling"):
        assert not {"mscale", "mscale_all_dim"} & set(config_of(again)[dialect] or ())


def test_a_second_patch_restores_the_pair(model, patched, config_of):
    """linear drops the pair from config.json; ropecli.yaml has it."""
    twice = patched(patched(model[0], "linear", 8.0), "yarn", 64.0)
    assert config_of(twice) == config_of(patched(model[0], "yarn", 64.0))


def test_the_pair_in_a_model_that_does_not_read_it_gives_a_warning(model, llama):
    """cos and sin get nothing then, and the softmax neither: YaRN without its attention factor."""
    spec = make_spec("yarn", 8.0, {"mscale": 0.707, "mscale_all_dim": 0.707})
    rules = [
        [finding.rule for finding in make_plan(open_checkpoint(name), spec).findings] for name in (llama, model[0])
    ]
    assert ["lost-attention-factor" in found for found in rules] == [True, False]
