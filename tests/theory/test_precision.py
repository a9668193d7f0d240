"""The error of float32 angles, held against the tables and the product of stock transformers."""

import json

import numpy as np
import pytest

from ropecli.checkpoint.encoding import native_parameters
from ropecli.rope import RopeGeometry, ScaledRope, ScalingSpec
from ropecli.scaling.registry import scale
from ropecli.theory.precision import float32_angle_error

GEOMETRIES = {
    "llama": RopeGeometry(128, 128, 10000.0, 4096),
    "small": RopeGeometry(32, 32, 10000.0, 256),
    "of a large base": RopeGeometry(128, 128, 5e5, 8192),
    "of a huge base": RopeGeometry(64, 64, 1e7, 32768),
    "partial": RopeGeometry(80, 32, 10000.0, 2048),
}
METHODS = {
    "none": {},
    "linear": {},
    "ntk": {},
    "abf": {"beta": 50.0},
    "yarn": {},
    "llama3": {},
    "longrope": {"long_factor": 0},  # a number for each pair is put in its place
    "p-rope": {"p": 0.5},
    "dynamic": {},
}
LAST = 2**20 - 1


def scaled(geometry: RopeGeometry, method: str, factor: float = 4.0) -> ScaledRope:
    params = METHODS[method]
    if "long_factor" in params:
        params = {"long_factor": np.geomspace(1, 3 * factor, geometry.pairs).tolist()}
    return scale(geometry, ScalingSpec(method, factor, params))


def live_error(rope: ScaledRope, position: int) -> np.ndarray:
    """How far the angles that transformers' module multiplies out are from those of float64, radians."""
    import torch
    from transformers import PhiConfig
    from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

    geometry = rope.geometry
    parameters = native_parameters(rope)
    config = PhiConfig(
        hidden_size=geometry.head_dim * 2,
        num_attention_heads=2,
        max_position_embeddings=geometry.original_max_position_embeddings,
        rope_parameters={**parameters, "partial_rotary_factor": geometry.rotary_dim / geometry.head_dim},
    )
    module = PhiRotaryEmbedding(config)
    if rope.spec.method == "dynamic":  # turns by the longest sequence that it has seen
        window = round(geometry.original_max_position_embeddings * rope.spec.factor)
        module(torch.zeros(1, 1, 1), torch.tensor([[window - 1]]))
    inv_freq = module.inv_freq
    assert inv_freq.shape == rope.inv_freq.shape
    angles = inv_freq[:, None].float() @ torch.tensor([[position]]).float()
    return np.abs(angles[:, 0].double().numpy() - rope.inv_freq * position)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("position", [4095, 131071, 10**6 - 1, LAST, 2**20])
def test_it_is_the_error_of_the_live_module(name, method, position):
    rope = scaled(GEOMETRIES[name], method)
    ours, theirs = float32_angle_error(rope, position).max(), live_error(rope, position).max()
    # dynamic takes a power of a power in float32, of which the last bit moves all pairs
    within = 4 if method == "dynamic" else 2
    assert theirs / within <= ours <= theirs * within
    assert ours > 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_it_grows_with_the_position(name, method):
    rope = scaled(GEOMETRIES[name], method)
    errors = [float32_angle_error(rope, position - 1).max() for position in (2**8, 2**11, 2**14, 2**17, 2**20)]
    assert errors == sorted(errors)
    assert errors[-1] > 100 * errors[0]


def test_it_is_never_more_than_float32_allows():
    """Two roundings of half a unit in the last place, and those of the power: a few parts in 10^7 of the angle."""
    for geometry in GEOMETRIES.values():
        for method in METHODS:
            rope = scaled(geometry, method)
            assert (float32_angle_error(rope, LAST) <= 1e-6 * rope.inv_freq * LAST + 1e-20).all()


def test_what_does_not_turn_has_no_error():
    for rope in (scale(GEOMETRIES["llama"], ScalingSpec("nope", 4.0)), scaled(GEOMETRIES["llama"], "p-rope")):
        still = rope.inv_freq == 0
        assert still.any()
        assert (float32_angle_error(rope, LAST)[still] == 0).all()


@pytest.mark.parametrize("method", ["none", "yarn"])
def test_inspect_reports_it_at_the_windows_end(method, llama, ropecli, tmp_path):
    """In the window that a patch is for, of which a position comes last that is one less."""
    assert ropecli("patch", llama, "-m", method, "--factor", 2**14, "--no-verify", "-o", tmp_path / "out").code == 0
    for folder, window in ((llama, 64), (tmp_path / "out", 2**20)):
        report = json.loads(ropecli("inspect", folder, "--json").out)
        spec = ScalingSpec(report["method"], report["factor"])
        rope = scale(RopeGeometry(32, 32, 10000.0, 64), spec)
        assert report["max_position_embeddings"] == window
        assert report["float32_angle_error"] == float32_angle_error(rope, window - 1).max() > 0
        assert report["ropes"][0]["float32_angle_error"] == report["float32_angle_error"]
    assert f"{report['float32_angle_error']:.1e} rad" in ropecli("inspect", folder).out


@pytest.mark.parametrize(
    ("changes", "position"),
    [
        # a block that was added, and max_position_embeddings left: as Qwen's README says
        ({"factor": 4.0, "original_max_position_embeddings": 64}, 255),
        # where the pretraining window is not named, there is one window alone
        ({"factor": 4.0}, 63),
    ],
)
def test_the_end_is_that_of_what_the_scaling_is_for(changes, position, llama, edited, ropecli):
    folder = edited(llama, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, **changes})
    report = json.loads(ropecli("inspect", folder, "--json").out)
    rope = scale(RopeGeometry(32, 32, 10000.0, 64), ScalingSpec("yarn", 4.0))
    assert report["float32_angle_error"] == float32_angle_error(rope, position).max()
