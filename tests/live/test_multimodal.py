"""Multimodal models and encoders: the text part is patched and proved, by all axes of its positions."""

import pytest
import torch
from tiny_settings import TINY
from transformers import AutoConfig

from ropecli.attention.patching import patch_to
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.checkpoint.patch_plan import make_plan
from ropecli.checkpoint.state import read_state
from ropecli.errors import ProofError
from ropecli.live.rotary import rotary_tables
from ropecli.live.skeleton import build_without_weights
from ropecli.scaling.spec import make_spec

SECTIONS = pytest.mark.transformers("5.17", "Qwen2-VL's sections act in the attention")


def plan(folder, method="yarn"):
    return make_plan(open_checkpoint(folder), make_spec(method, 4.0))


@pytest.mark.parametrize(
    ("model_type", "method"),
    [
        pytest.param("qwen2_vl", "yarn", marks=SECTIONS),
        ("qwen3_vl", "nope"),
        pytest.param(
            "qwen3_vl",
            "dynamic",
            marks=pytest.mark.transformers("5.23", "with 5.18 its angles are others, so the patch is refused"),
        ),
    ],
)
def test_mrope_keeps_which_axis_rotates_which_pair(model_type, method, build, tmp_path):
    """A token of an image has a time, a height and a width. Each pair rotates by one of the three, as before."""
    source = build(model_type)
    patch_to(plan(source, method), tmp_path / "out")
    configs = (AutoConfig.from_pretrained(folder) for folder in (source, tmp_path / "out"))
    (before,), (after,) = (rotary_tables(build_without_weights(config)) for config in configs)
    sections = AutoConfig.from_pretrained(source).text_config.rope_parameters["mrope_section"]
    for axis, size in enumerate(sections):
        alone = torch.zeros(3, 1, 1, dtype=torch.long)
        alone[axis] = 9
        rotated = [table.module(torch.zeros(1), alone)[1].flatten()[:16] != 0 for table in (before, after)]
        assert rotated[0].sum() == size
        torch.testing.assert_close(*rotated)


@SECTIONS
@pytest.mark.parametrize("sections", [[6, 5, 5], [4, 5, 7]])
def test_other_mrope_sections_are_refused(sections, build, tmp_path):
    wrong = plan(build("qwen2_vl"))
    wrong.config["text_config"]["rope_parameters"]["mrope_section"] = sections
    wrong.config["text_config"]["rope_scaling"]["mrope_section"] = sections
    with pytest.raises(ProofError, match="rotate by the axes"):
        patch_to(wrong, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_text_config_with_only_what_differs_from_the_defaults(written, live):
    """LLaVA 1.5 has no hidden_size, heads or base there: transformers takes the defaults of Llama."""
    text = {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 512}
    folder = written({"model_type": "llava", "text_config": text, "vision_config": {"model_type": "clip_vision_model"}})
    rope = read_state(open_checkpoint(folder)).positions.main
    assert live(folder)[None].inv_freq == pytest.approx(rope.inv_freq, rel=1e-6)


UNKNOWN = {**TINY, "model_type": "lama", "rope_theta": 1e4, "head_dim": 32}


def test_an_unknown_type_is_refused_and_patched_only_without_the_proof(ropecli, written):
    source = written({**UNKNOWN, "transformers_version": "99.1.0"})
    command = ["patch", source, "--method", "yarn", "--factor", "4", "--output", source / "out"]
    refused = ropecli(*command)
    assert refused.code == 2
    assert "does not know model_type 'lama'" in refused.err
    assert "Install a release that does (config.json is by 99.1.0)" in refused.err
    assert not (source / "out").exists()
    done = ropecli(*command, "--no-verify")
    assert done.code == 0, done.err
    assert "not proved: that model_type 'lama', which ropecli does not know, reads these RoPE fields" in done.err


@pytest.mark.parametrize("method", ["none", "yarn"])
def test_a_qwen2_vl_config_as_on_the_hub(method, written, config_of, tmp_path):
    """Flat, without text_config, and with the rope_type `mrope` of transformers 4."""
    source = written(
        {
            **TINY,
            "model_type": "qwen2_vl",
            "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2},
            "rope_theta": 1e6,
            "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
        }
    )
    assert patch_to(plan(source, method), tmp_path / "out") == 1
    assert config_of(tmp_path / "out")["rope_scaling"]["mrope_section"] == [4, 6, 6]
