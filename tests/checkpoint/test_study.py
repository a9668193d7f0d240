"""A study of a checkpoint: the pretrained rope, and those that methods give, by name."""

import json

import numpy as np
import pytest

from ropecli.checkpoint.reading import open_checkpoint
from ropecli.checkpoint.study import PRETRAINED, make_study, study_report
from ropecli.errors import CheckpointError
from ropecli.rope import RopeGeometry, ScalingSpec
from ropecli.scaling.registry import scale
from ropecli.theory.base_bound import LONGEST

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


def test_a_given_window_takes_the_configs_place(checkpoint):
    study = make_study(checkpoint(), [ScalingSpec("yarn", 4.0)], original_length=128)
    assert (study.window, study.target) == (128, 512)


def test_a_remapping_keeps_the_frequencies(checkpoint):
    rope = make_study(checkpoint(), [ScalingSpec("rerope", 4.0)]).ropes["rerope ×4"]
    assert rope.remapping.params == {"window": 256}
    np.testing.assert_array_equal(rope.inv_freq, rope.geometry.inv_freq())


def test_warnings_are_said_once(checkpoint):
    vague = checkpoint(rope_scaling={"rope_type": "linear", "factor": 2.0})
    warnings = make_study(vague, [None, ScalingSpec("yarn", 2.0), ScalingSpec("ntk", 2.0)]).warnings
    assert len(warnings) == len(set(warnings))
    assert sum("--original-length" in warning for warning in warnings) == 1


def test_heads_that_would_fill_the_memory_are_refused(checkpoint):
    assert len(make_study(checkpoint(head_dim=2048)).ropes[PRETRAINED].inv_freq) == 1024
    with pytest.raises(CheckpointError, match="1025 rotary pairs in a head; theory looks at 1024 at most"):
        make_study(checkpoint(head_dim=2050))


def test_the_report_works_out_no_base_for_endless_targets(checkpoint, monkeypatch):
    from ropecli.theory import support

    asked = []
    monkeypatch.setattr(support, "smallest_base", lambda geometry, length: asked.append(length) or 7.0)
    near = study_report(make_study(checkpoint(max_position_embeddings=LONGEST)))
    far = study_report(make_study(checkpoint(max_position_embeddings=LONGEST + 1)))
    assert (near["smallest_base"], far["smallest_base"]) == (7.0, None)
    assert asked == [LONGEST]
    assert near["supported_length"] == far["supported_length"]
