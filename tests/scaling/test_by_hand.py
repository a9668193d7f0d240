"""Every method on numbers that a pencil gives: eight dimensions and base 10000 turn by 1, 1/10, 1/100 and 1/1000.

The window where the number of turns matters, 6283, is next to 2000π: its pairs rotate 1000, 100, 10 and 1 times in it,
up to 3 parts in 100,000.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

from ropecli.rope import RopeGeometry
from ropecli.scaling.registry import scaling_methods
from ropecli.scaling.spec import ScaledRope, make_spec, remapping_of, scale

WINDOW = 6283
GEOMETRY = RopeGeometry(8, 8, 10_000.0, WINDOW)
BASE = [1, 0.1, 0.01, 0.001]
TURN = 2 * math.pi
ROOT = math.sqrt(math.sqrt(16))  # of a base 16 times as large
RAISED = [1, 0.1 / ROOT, 0.01 / ROOT**2, 0.001 / ROOT**3]  # 1, 1/20, 1/400, 1/8000

# method, factor, parameters -> inv_freq, attention factor, all to 1e-9
STATIC = {
    # Chen et al., eq. 4: f'(x, m) = f(x, m/s)
    "linear": ("linear", 4, {}, [0.25, 0.025, 0.0025, 0.00025], 1),
    "abf-base": ("abf", 4, {"rope_theta": 160_000.0}, RAISED, 1),
    "abf-beta": ("abf", 4, {"beta": 16.0}, RAISED, 1),
    # YaRN, eq. 16: b' = b·s^(d/(d-2)) = 10000·8^(8/6) = 160000; the slowest pair rotates 8 times slower
    "ntk": ("ntk", 8, {}, RAISED, 1),
    # Ramp from pair ⌊log10(1000/32)⌋ = 1 to pair ⌈log10(1000/1)⌉ = 3: pair 2 is half way, 0.01·(1/2 + 1/8).
    "ntk-by-parts": ("ntk-by-parts", 4, {}, [1, 0.1, 0.00625, 0.00025], 1),
    # YaRN, eq. 22: √(1/t) = 0.1·ln 4 + 1
    "yarn": ("yarn", 4, {}, [1, 0.1, 0.00625, 0.00025], 1.1386294361119891),
    # DeepSeek's: (0.1·2·ln 4 + 1) / (0.1·0.5·ln 4 + 1) = 1.2772589/1.0693147
    "yarn-mscale": ("yarn", 4, {"mscale": 2.0, "mscale_all_dim": 0.5}, [1, 0.1, 0.00625, 0.00025], 1.1944648761),
    # Ding et al.: √(1 + ln s/ln L) with s = √L is √1.5
    "longrope": ("longrope", math.sqrt(WINDOW), {"long_factor": [1, 2, 4.0, 8]}, RAISED, 1.2247448713915890),
    "p-rope": ("p-rope", 4, {"p": 0.5}, [1, 0.1, 0, 0], 1),
    "nope": ("nope", 4, {}, [0, 0, 0, 0], 1),
    # the slowest pair alone has a wavelength beyond the window, and the first of the clipped pairs is kept
    "cope": ("cope", 4, {}, BASE, 1),
    "cope-three": ("cope", 4, {"clipped_pairs": 3}, [1, 0.1, 0.005, 0], 1),  # (1 + cos φ)/2 is 1, 1/2, 0
    "resonance": ("resonance", 4, {}, [TURN / 6, TURN / 63, TURN / 628, TURN / 6283], 1),
    "yarn+resonance": ("yarn+resonance", 4, {}, [TURN / 6, TURN / 63, TURN / 1005, TURN / 25133], 1.1386294361119891),
    "yarn+cope": ("yarn+cope", 4, {"clipped_pairs": 3}, [1, 0.1, 0.003125, 0], 1.1386294361119891),
    "abf+cope": ("abf+cope", 4, {"beta": 16.0, "clipped_pairs": 3}, [1, 0.05, 0.00125, 0], 1),
    # with base 160000 the ramp still goes from pair 1 to pair 3, 4·log(31.25) and 4·log(1000) of log(160000)
    "abf+yarn": ("abf+yarn", 4, {"beta": 16.0}, [1, 0.05, 0.0015625, 0.00003125], 1.1386294361119891),
    "custom-frequencies": ("custom", 4, {"inv_freq": [2, 0.5, 0.7, 0], "attention_factor": 1.1}, [2, 0.5, 0.7, 0], 1.1),
}


def assert_is(ours: ScaledRope, inv_freq: list[float], attention_factor: float) -> None:
    np.testing.assert_allclose(ours.inv_freq, inv_freq, rtol=1e-9)
    assert ours.attention_factor == pytest.approx(attention_factor, rel=1e-9)


@pytest.mark.parametrize(("method", "factor", "params", "inv_freq", "attention_factor"), STATIC.values(), ids=STATIC)
def test_static(method, factor, params, inv_freq, attention_factor):
    ours = scale(GEOMETRY, make_spec(method, factor, params))
    assert_is(ours, inv_freq, attention_factor)
    assert params.items() <= ours.spec.params.items()


def test_cope_clips_the_pairs_that_complete_no_rotation_in_pretraining():
    """Llama 3: 2π·500000^(i/64) > 8192 from i = 64·log(8192/2π)/log(500000) = 34.98 on, so for 35 to 63."""
    assert scale(RopeGeometry(128, 128, 5e5, 8192), make_spec("yarn+cope", 4)).spec.params["clipped_pairs"] == 29


@pytest.mark.parametrize(
    ("method", "params", "reached"),
    [
        ("yarn+rerope", {}, 2 * WINDOW),
        ("yarn+rerope", {"frequency_factor": 4}, 4 * WINDOW),
        ("abf+rerope", {"beta": 16}, WINDOW),
        ("yarn+string", {}, 4 * WINDOW),
    ],
)
def test_where_distances_begin_to_extend(method, params, reached):
    """At ×4, yarn's own factor is 2 unless it is given, and the distance method starts there."""
    ours = scale(GEOMETRY, make_spec(method, 4, params))
    assert (ours.remapping.pretrained, ours.remapping.target) == (reached, 4 * WINDOW)
    frequencies = make_spec(method.split("+")[0], reached / WINDOW, {"beta": 16} if "beta" in params else {})
    np.testing.assert_array_equal(ours.inv_freq, scale(GEOMETRY, frequencies).inv_freq)
    assert ours.attention_factor == scale(GEOMETRY, frequencies).attention_factor


@pytest.mark.parametrize(("option", "last"), [("log_n", 2), ("yarn_temperature", 0.1 * math.log(64) + 1)])
def test_temperatures_of_a_model_that_was_trained_on_64_tokens(option, last):
    """The first, the 64th and the 4,096th token: ln 4096 is 2·ln 64, and 4096 is 64·64."""
    remapping = remapping_of(make_spec("rerope", 4, {option: True}), 64, 256)
    np.testing.assert_allclose(remapping.score_factor(np.array([0, 63, 4095])), [1, 1, last], rtol=1e-12)
    assert remapping.params[option] is True


def test_llama_4s_temperature_is_that_of_transformers():
    positions = np.arange(1000)
    remapping = remapping_of(make_spec("rerope", 4, {"llama4_temperature": True}), 64, 256).score_factor(positions)
    expected = get_llama_4_attn_scale(torch.from_numpy(positions)[None], 0.1, 64).flatten()
    np.testing.assert_allclose(remapping, expected, rtol=1e-6)


def test_methods_of_other_distances_leave_the_frequencies():
    for method in (name for name, method in scaling_methods().items() if method.remaps and method.uses_factor):
        ours = scale(replace(GEOMETRY, still_pairs=1), make_spec(method, 4))
        assert_is(ours, [1, 0.1, 0.01, 0], 1)
        assert ours.rope_theta == 10_000
        assert (ours.remapping.pretrained, ours.remapping.target) == (WINDOW, 4 * WINDOW)


@pytest.mark.parametrize(
    ("method", "params", "written"),
    [
        ("ntk", {}, 160_000),
        ("linear", {}, 10_000),
        ("p-rope", {}, 10_000),
        ("abf+yarn", {"beta": 16}, 160_000),
        ("abf+yarn+cope", {"beta": 16}, 10_000),
    ],
)
def test_only_another_base_is_written_as_one(method, params, written):
    assert scale(GEOMETRY, make_spec(method, 8, params)).rope_theta == pytest.approx(written, rel=1e-12)


# The slowest pair was pretrained without rotation, and stays so.
STILL = {
    "linear": ("linear", 8, {}, [0.125, 0.0125, 0.00125, 0]),
    # the slowest pair that turns is pair 2: 8^(8/4) = 64 times the base makes it turn 8 times slower
    "ntk": ("ntk", 8, {}, [1, 0.1 / 64**0.25, 0.00125, 0]),
    "yarn": ("yarn", 4, {}, [1, 0.1, 0.00625, 0]),
    "llama3": ("llama3", 4, {"low_freq_factor": 11, "high_freq_factor": 20}, [1, 0.1, 0.0025, 0]),
    "longrope": ("longrope", 4, {"long_factor": [1, 2, 4, 8]}, [1, 0.05, 0.0025, 0]),
    "cope": ("cope", 4, {"clipped_pairs": 2}, [1, 0.1, 0.01, 0]),
    "resonance": ("resonance", 4, {}, [TURN / 6, TURN / 63, TURN / 628, 0]),
    "abf+yarn+resonance": ("abf+yarn+resonance", 4, {"beta": 16}, [TURN / 6, TURN / 126, TURN / 4021, 0]),
    "custom-frequencies": ("custom", 4, {"inv_freq": [1, 1, 1, 1]}, [1, 1, 1, 1]),
}


@pytest.mark.parametrize(("method", "factor", "params", "inv_freq"), STILL.values(), ids=STILL)
def test_a_still_pair(method, factor, params, inv_freq):
    ours = scale(replace(GEOMETRY, still_pairs=1), make_spec(method, factor, params))
    np.testing.assert_allclose(ours.inv_freq, inv_freq, rtol=1e-9)


def test_dynamic_with_a_still_pair():
    geometry = replace(GEOMETRY, original_max_position_embeddings=64, still_pairs=1)
    assert_is(scale(geometry, make_spec("dynamic", 4), 176), STILL["ntk"][3], 1)
    assert_is(scale(geometry, make_spec("dynamic", 4), 64), [1, 0.1, 0.01, 0], 1)
