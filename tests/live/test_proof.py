"""The proof catches a patch that stock transformers does not honour, names the module, and leaves nothing behind."""

import copy
import dataclasses

import numpy as np
import pytest

from ropecli.attention.patching import patch_to
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.checkpoint.patch_plan import make_plan
from ropecli.config import settings
from ropecli.errors import ProofError
from ropecli.live.proof import prove
from ropecli.scaling.spec import make_spec, scale

TWO_LISTS = {"long_factor": [4.0] * 16, "short_factor": [1.1] * 16}
LAYERS = ["sliding_attention", "full_attention"]


def plan(folder, method="yarn", factor=4.0, **params):
    return make_plan(open_checkpoint(folder), make_spec(method, factor, params))


def tampered(plan, **rope_parameters: object):
    """The same plan with a config.json that says something else, in both dialects; a value of ... removes."""
    config = copy.deepcopy(plan.config)
    for key, value in rope_parameters.items():
        for dialect in ("rope_parameters", "rope_scaling"):
            config[dialect].pop(key, None)
            if value is not ...:
                config[dialect][key] = value
    changed = dataclasses.replace(plan)
    changed.__dict__["config"] = config
    return changed


WRONG = {  # method and parameters, change to config.json, message
    "linear": ("linear", {}, {"factor": 4.001}, r": pair \d+ rotates by .* in stock transformers"),
    "rope_type": ("yarn", {}, {"rope_type": "default", "type": "default"}, r": pair \d+ rotates by"),
    "factor": (
        "yarn",
        {"attention_factor": 1.5},
        {"attention_factor": 1.0001},
        r": the attention factor is 1\.0001",
    ),
    "no factor": (
        "longrope",
        {**TWO_LISTS, "attention_factor": 1.5},
        {"attention_factor": ...},
        "attention factor is",
    ),
    # compared on both sides of the pretraining length
    "short": ("longrope", TWO_LISTS, {"short_factor": [1.2] * 16}, " at length 1: pair"),
    "long": ("longrope", TWO_LISTS, {"long_factor": [4.1] * 16}, " at length 65: pair"),
    "late switch": ("longrope", TWO_LISTS, {"original_max_position_embeddings": 128}, " at length 65: pair"),
    # transformers takes it for dynamic NTK's pretraining length; raised, it switches the method off
    "dynamic": ("dynamic", {}, {"max_position_embeddings": 256}, " at length 65"),
}


@pytest.mark.parametrize(("method", "params", "change", "message"), WRONG.values(), ids=WRONG)
def test_a_config_that_differs_from_the_patch_is_refused_and_leaves_nothing(
    method, params, change, message, llama, tmp_path
):
    wrong = tampered(plan(llama, method, **params), **change)
    wrong.config.update({key: value for key, value in change.items() if key in wrong.config})  # the one at the top wins
    with pytest.raises(ProofError, match=f"rotary_emb.*{message}"):
        patch_to(wrong, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_layer_type_of_two_is_refused_by_its_name(build, tmp_path):
    gemma = build("gemma3_text", head_dim=32, layer_types=LAYERS, sliding_window=32)
    wrong = plan(gemma, "linear")
    ropes = dict(wrong.positions.ropes)
    rope = ropes["sliding_attention"]
    ropes["sliding_attention"] = scale(rope.geometry, make_spec("linear", 2.0))
    wrong = dataclasses.replace(wrong, positions=dataclasses.replace(wrong.positions, ropes=ropes))
    with pytest.raises(ProofError, match="rotary_emb"):
        patch_to(wrong, tmp_path / "out")
    del ropes["sliding_attention"]
    with pytest.raises(ProofError, match="layers of type 'sliding_attention'"):
        patch_to(wrong, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_difference_of_one_in_ten_thousand_in_a_single_pair_is_refused(llama):
    right = plan(llama)
    rope = right.positions.ropes[None]
    assert prove(right) == 1
    for pair in (0, 7, 15):
        off = rope.inv_freq * np.where(np.arange(16) == pair, 1.0001, 1.0)
        positions = dataclasses.replace(right.positions, ropes={None: dataclasses.replace(rope, inv_freq=off)})
        with pytest.raises(ProofError, match=f"pair {pair} rotates"):
            prove(dataclasses.replace(right, positions=positions))


@pytest.mark.parametrize(("method", "params"), [("llama3", {}), ("yarn", {"truncate": False})])
def test_float32_rounding_in_a_large_model_is_no_error(method, params, llama, edited, tmp_path):
    """A ramp that mixes two frequencies far apart carries the rounding of the larger one."""
    large = edited(
        llama,
        hidden_size=256,
        head_dim=128,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    assert patch_to(plan(large, method, 128.0, **params), tmp_path / "out") == 1


SMALL = {"vocab_size": 8, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
PHIMOE = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 64, **TWO_LISTS}
MISREAD = {  # config.json, what the message says of stock transformers and of ropecli
    "pairs": (
        {"model_type": "llama", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        r"16 pairs rotate in stock transformers, but 8 in ropecli",
    ),
    "frequency": (
        {
            "model_type": "hunyuan_v1_dense",
            "rope_theta": 1e4,
            "rope_scaling": {"rope_type": "dynamic", "factor": 1.0, "alpha": 100.0},
        },
        r"pair 15 rotates by 1\.77828e-06 radians per token in stock transformers, but by 0\.000177828 in ropecli",
    ),
    "attention factor": (
        {
            "model_type": "phimoe",
            "rope_theta": 1e4,
            "rope_scaling": {**PHIMOE, "short_mscale": 1.1, "long_mscale": 1.2},
        },
        r"at length 1: the attention factor is 1\.1 in stock transformers, but 1\.2 in ropecli",
    ),
}


@pytest.mark.parametrize(("config", "message"), MISREAD.values(), ids=MISREAD)
def test_a_config_that_transformers_reads_otherwise_is_refused(config, message, written, tmp_path, monkeypatch):
    """A patch would start from another base, and then be proved against itself."""
    monkeypatch.setattr(settings, "has_alpha", lambda *_: False)  # as for a key that ropecli does not know
    with pytest.raises(ProofError, match=f"does not read this config.json as transformers does.* {message}"):
        patch_to(plan(written({**SMALL, "max_position_embeddings": 64, **config})), tmp_path / "out")
    assert not (tmp_path / "out").exists()
