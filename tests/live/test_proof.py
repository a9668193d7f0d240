"""The proof catches a patch that stock transformers does not honour, names the module, and leaves nothing behind."""

import copy
import dataclasses

import numpy as np
import pytest

from ropecli.attention.patching import patch_to
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.checkpoint.patch_plan import make_plan
from ropecli.errors import CheckpointError, ProofError
from ropecli.live.proof import prove
from ropecli.live.stock_transformers import build_without_weights
from ropecli.scaling.scale import scale
from ropecli.scaling.spec import make_spec

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
    return dataclasses.replace(plan, config=config)


@pytest.mark.parametrize(
    ("method", "change"),
    [
        ("linear", {"factor": 4.001}),
        ("yarn", {"beta_slow": 0.5, "betaslow": 1.0}),
        ("yarn", {"truncate": False}),
        ("yarn", {"rope_type": "default", "type": "default"}),
        ("llama3", {"low_freq_factor": 1.01}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_frequencies_that_the_live_model_does_not_have(method, change, llama, tmp_path):
    with pytest.raises(ProofError, match=r"rotary_emb: pair \d+ rotates by .* in the live module"):
        patch_to(tampered(plan(llama, method), **change), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("method", "factor"), [("yarn", 1.0001), ("longrope", ...)])
def test_an_attention_factor_that_the_live_model_does_not_have(method, factor, llama, tmp_path):
    params = {"long_factor": [2.0] * 16} if method == "longrope" else {}
    wrong = tampered(plan(llama, method, attention_factor=1.5, **params), attention_factor=factor)
    with pytest.raises(ProofError, match=r"rotary_emb: the live attention factor is 1\.\d+, the patch's 1\.5"):
        patch_to(wrong, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"short_factor": [1.2] * 16}, "at length 1"),
        ({"long_factor": [4.1] * 16}, "at length 65"),
        ({"original_max_position_embeddings": 32}, "at length 64"),
        ({"original_max_position_embeddings": 128}, "at length 65"),
    ],
    ids=["short", "long", "early-switch", "late-switch"],
)
def test_frequencies_that_switch_are_compared_on_both_sides_of_the_window(change, where, llama, tmp_path):
    wrong = tampered(plan(llama, "longrope", **TWO_LISTS), **change)
    if "original_max_position_embeddings" in change:
        wrong.config.update(change)  # the one at the top wins
    with pytest.raises(ProofError, match=f"rotary_emb {where}: pair"):
        patch_to(wrong, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_window_raised_under_dynamic_is_caught(llama, tmp_path):
    """transformers takes max_position_embeddings for dynamic NTK's pretraining length; raised, it switches it off."""
    dynamic = plan(llama, "dynamic")
    dynamic.config["max_position_embeddings"] = 256
    with pytest.raises(ProofError, match="rotary_emb at length 65"):
        patch_to(dynamic, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_one_layer_type_of_two_is_caught_by_its_name(build, tmp_path):
    gemma = build("gemma3_text", head_dim=32, layer_types=LAYERS, sliding_window=32)
    wrong = plan(gemma, "linear")
    ropes = dict(wrong.ropes)
    rope = ropes["sliding_attention"]
    ropes["sliding_attention"] = scale(rope.geometry, make_spec("linear", 2.0))
    with pytest.raises(ProofError, match="rotary_emb"):
        patch_to(dataclasses.replace(wrong, ropes=ropes), tmp_path / "out")
    del ropes["sliding_attention"]
    with pytest.raises(ProofError, match="layers of type 'sliding_attention'"):
        patch_to(dataclasses.replace(wrong, ropes=ropes), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_one_in_ten_thousand_in_one_pair_is_caught(llama, tmp_path):
    patch_to(plan(llama), tmp_path / "out")
    rope = plan(llama).ropes[None]
    assert prove(tmp_path / "out", {None: rope}) == 1
    for pair in (0, 7, 15):
        off = rope.inv_freq * np.where(np.arange(16) == pair, 1.0001, 1.0)
        with pytest.raises(ProofError, match=f"pair {pair} rotates"):
            prove(tmp_path / "out", {None: dataclasses.replace(rope, inv_freq=off)})


@pytest.mark.parametrize(("method", "params"), [("llama3", {}), ("yarn", {"truncate": False})])
def test_what_float32_loses_in_a_large_model_is_no_error(method, params, llama, edited, tmp_path):
    """A ramp that mixes two frequencies far apart carries the rounding of the larger one."""
    large = edited(
        llama,
        hidden_size=256,
        head_dim=128,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    assert patch_to(plan(large, method, 128.0, **params), tmp_path / "out") == 1


def test_an_error_in_the_code_of_transformers_is_told_as_such(written):
    """Its yarn multiplies a head_dim of null."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config = {"vocab_size": 8, "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1, "head_dim": None}
    folder = written({"model_type": "mixtral", **config, "rope_theta": 1e4, "rope_scaling": yarn})
    message = r"a model of type mixtral from this config: transformers \S+ itself fails with TypeError \(.*\)\. Check"
    with pytest.raises(CheckpointError, match=message):
        build_without_weights(folder)


def test_no_code_of_the_checkpoint_runs(llama, edited, tmp_path):
    source = edited(llama, model_type="own", auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"})
    (source / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(CheckpointError):
        patch_to(plan(source), tmp_path / "out")
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()


def test_a_release_that_cannot_read_yarn_by_layer_type_is_named(llama, monkeypatch):
    from transformers import AutoConfig

    def stop(*_, **__):  # as before 5.9
        raise KeyError("original_max_position_embeddings")

    monkeypatch.setattr(AutoConfig, "from_pretrained", stop)
    with pytest.raises(CheckpointError, match=r"needs transformers 5\.9 or newer"):
        prove(llama, {})
