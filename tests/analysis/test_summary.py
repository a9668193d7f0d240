"""The summary of a rope: what it says of Llama 2, by hand, and of a distance method."""

import math

import numpy as np
import pytest

from ropecli.analysis.summary import summarize
from ropecli.rope import RopeGeometry
from ropecli.scaling.spec import ScaledRope, make_spec, scale

DEMO = RopeGeometry(32, 32, 10_000.0, 256)
LLAMA_2 = RopeGeometry(128, 128, 10_000.0, 4096)


def scaled(geometry: RopeGeometry, method: str, factor: float) -> ScaledRope:
    params = {
        "abf": {"beta": 50.0},
        "custom": {"factors": [2.0] * geometry.pairs},
        "longrope": {"long_factor": [1.0] * (geometry.pairs - 1) + [1e30]},
    }
    return scale(geometry, make_spec(method, factor, params.get(method, {})))


def test_llama_2_by_hand():
    summary = summarize(scale(LLAMA_2, make_spec("linear", 8.0)), 32768)
    slowest = 10_000 ** (-126 / 128) / 8
    assert summary["longest_wavelength"] == pytest.approx(2 * math.pi / slowest)
    assert summary["critical_dimension"] == 92
    assert summary["frequency_over_pretrained"] == pytest.approx([1 / 8] * 64)
    assert summary["rotations_in_pretraining_length"][0] == pytest.approx(4096 / (16 * math.pi))
    assert summary["rotations_in_target_length"] == pytest.approx(
        np.multiply(8, summary["rotations_in_pretraining_length"])
    )
    assert summary["largest_distance"] == 32767
    assert summary["closest_images_gap"] == 1
    # the last of PI's images, at 32,767/8, is seven eighths of a token beyond the last old one; no other is as far
    apart = 2 * np.sin(7 / 8 * LLAMA_2.inv_freq() / 2)
    assert summary["distance_to_old_images"] == pytest.approx(math.sqrt((apart**2).mean()))


def test_a_distance_method_is_summarized_at_its_remapped_distances():
    summary = summarize(scaled(DEMO, "rerope", 8.0), 2048)
    assert summary["largest_distance"] == 128
    assert summary["rotations_in_target_length"] == pytest.approx(129 * DEMO.inv_freq() / (2 * math.pi))
    assert summary["frequency_over_pretrained"] == [1] * 16
    assert summary["closest_images"] is None
    assert summary["distance_to_old_images"] is None
