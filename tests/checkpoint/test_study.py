"""A study of a checkpoint: the pretrained rope, and those that methods give, by name."""

import json

import numpy as np
import pytest

from ropecli.checkpoint.reading import open_checkpoint
from ropecli.checkpoint.study import PRETRAINED, make_study
from ropecli.rope import RopeGeometry, ScalingSpec
from ropecli.scaling.registry import scale

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


@pytest.fixture
def checkpoint(tmp_path):
    def make(**values):
        (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **values}))
        return open_checkpoint(tmp_path)

    return make


def test_each_rope_is_the_methods_own(checkpoint):
    specs = [ScalingSpec("yarn", 4.0, {"beta_fast": 16.0}), ScalingSpec("linear", 4.0)]
    study = make_study(checkpoint(), specs)
    geometry = RopeGeometry(32, 32, 1e4, 512)
    assert (study.geometry, study.window, study.target) == (geometry, 512, 2048)
    assert list(study.ropes) == [PRETRAINED, "yarn ×4 (beta_fast 16)", "linear ×4"]
    np.testing.assert_array_equal(study.ropes[PRETRAINED].inv_freq, geometry.inv_freq())
    for name, spec in zip(("yarn ×4 (beta_fast 16)", "linear ×4"), specs, strict=True):
        expected = scale(geometry, spec)
        np.testing.assert_array_equal(study.ropes[name].inv_freq, expected.inv_freq)
        assert study.ropes[name].attention_factor == expected.attention_factor


def test_a_scaled_checkpoint_as_it_is(checkpoint):
    study = make_study(checkpoint(rope_scaling=LLAMA3), [None, ScalingSpec("llama3", 8.0), ScalingSpec("llama3", 4.0)])
    assert list(study.ropes) == [PRETRAINED, "llama3 ×4, as it is", "llama3 ×8", "llama3 ×4"]
    assert (study.window, study.target) == (128, 1024)
    as_it_is, again = study.ropes["llama3 ×4, as it is"], study.ropes["llama3 ×4"]
    np.testing.assert_array_equal(as_it_is.inv_freq, again.inv_freq)
    assert study.ropes[PRETRAINED].spec.method == "none"
    np.testing.assert_array_equal(study.ropes[PRETRAINED].inv_freq, 1e4 ** (-np.arange(16) / 16))


def test_a_remapping_keeps_the_frequencies(checkpoint):
    rope = make_study(checkpoint(), [ScalingSpec("rerope", 4.0)]).ropes["rerope ×4"]
    assert rope.remapping.params == {"window": 256}
    np.testing.assert_array_equal(rope.inv_freq, rope.geometry.inv_freq())
