"""The error of float32 angles, held against the tables and the product of stock transformers."""

import json

import numpy as np
import pytest

from ropecli.analysis.wavelengths import float32_angle_error
from ropecli.config.encoding import native_parameters
from ropecli.rope import RopeGeometry
from ropecli.scaling.scale import scale
from ropecli.scaling.spec import ScaledRope, make_spec

LLAMA_2 = RopeGeometry(128, 128, 10000.0, 4096)
GEOMETRIES = {
    "llama 2": LLAMA_2,
    "large base": RopeGeometry(128, 128, 5e5, 8192),
    "partial": RopeGeometry(80, 32, 10000.0, 2048),
}
LAST = 2**20 - 1


def live_error(rope: ScaledRope, position: int) -> np.ndarray:
    """How far the angles that transformers' module multiplies out are from those of float64, radians."""
    import torch
    from transformers import PhiConfig
    from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

    geometry = rope.geometry
    config = PhiConfig(
        hidden_size=geometry.head_dim * 2,
        num_attention_heads=2,
        max_position_embeddings=geometry.original_max_position_embeddings,
        rope_parameters={**native_parameters(rope), "partial_rotary_factor": geometry.rotary_dim / geometry.head_dim},
    )
    angles = PhiRotaryEmbedding(config).inv_freq[:, None].float() @ torch.tensor([[position]]).float()
    return np.abs(angles[:, 0].double().numpy() - rope.inv_freq * position)


@pytest.mark.parametrize("method", ["none", "yarn"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_it_is_the_error_of_the_live_module(name, method):
    rope = scale(GEOMETRIES[name], make_spec(method, 4.0))
    ours, theirs = float32_angle_error(rope, LAST).max(), live_error(rope, LAST).max()
    assert theirs / 4 <= ours <= theirs * 4
    assert (float32_angle_error(rope, LAST) <= 1e-6 * rope.inv_freq * LAST + 1e-20).all()


@pytest.mark.parametrize("method", ["none", "yarn"])
def test_inspect_reports_it_at_the_windows_end(method, llama, ropecli, tmp_path):
    """In the window that a patch is for, of which a position comes last that is one less."""
    assert ropecli("patch", llama, "-m", method, "--factor", 2**14, "--no-verify", "-o", tmp_path / "out").code == 0
    for folder, window in ((llama, 64), (tmp_path / "out", 2**20)):
        report = json.loads(ropecli("inspect", folder, "--json").out)
        spec = make_spec(report["method"], report["factor"])
        rope = scale(RopeGeometry(32, 32, 10000.0, 64), spec)
        assert report["max_position_embeddings"] == window
        assert report["float32_angle_error"] == float32_angle_error(rope, window - 1).max() > 0
        assert report["ropes"][0]["float32_angle_error"] == report["float32_angle_error"]
    assert f"{report['float32_angle_error']:.1e} rad" in ropecli("inspect", folder).out
