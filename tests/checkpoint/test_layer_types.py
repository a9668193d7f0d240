"""Models whose layers see differently far: each layer type has its own rope, and only the far-seeing one is scaled."""

import numpy as np
import pytest

from ropecli.checkpoint.plan import make_plan
from ropecli.checkpoint.reading import open_checkpoint
from ropecli.rope import ScalingSpec

LAYERS = ["sliding_attention", "full_attention"]


@pytest.fixture(scope="module")
def gemma3(build):
    return build("gemma3_text", head_dim=32, layer_types=LAYERS, sliding_window=32)


@pytest.fixture(scope="module")
def olmo3(build):
    return build("olmo3", layer_types=LAYERS, sliding_window=32)


def test_only_the_layers_that_see_the_whole_context_are_scaled(gemma3, patched, config_of, live):
    before, folder = config_of(gemma3)["rope_parameters"], patched(gemma3, "linear")
    after = config_of(folder)["rope_parameters"]
    assert after["sliding_attention"] == before["sliding_attention"]
    assert after["full_attention"]["factor"] == 4.0
    unscaled, tables = live(gemma3), live(folder)
    np.testing.assert_array_equal(tables["sliding_attention"].inv_freq, unscaled["sliding_attention"].inv_freq)
    np.testing.assert_allclose(tables["full_attention"].inv_freq, unscaled["full_attention"].inv_freq / 4, rtol=2e-6)


def test_the_older_dialect_of_gemma3(gemma3, edited, patched, live, assert_inspection_is_live):
    older = edited(
        gemma3,
        rope_parameters=...,
        rope_theta=2e6,
        rope_local_base_freq=15000.0,
        rope_scaling={"rope_type": "linear", "factor": 2.0},
    )
    assert_inspection_is_live(older)
    tables = live(patched(older, "ntk", original_length=64))
    np.testing.assert_allclose(tables["sliding_attention"].inv_freq, 15000.0 ** (-np.arange(16) / 16), rtol=2e-6)
    slowest = 2e6 ** (-15 / 16)
    assert tables["full_attention"].inv_freq[-1] == pytest.approx(slowest / 4, rel=2e-6)


@pytest.mark.parametrize("method", ["yarn", "abf"])
def test_the_older_reader_of_gemma3_finds_both_bases(method, gemma3, patched, config_of):
    """It reads the sliding layers' base from rope_local_base_freq, and would take 10000 without."""
    params = {"rope_theta": 3e6} if method == "abf" else {}
    config = config_of(patched(gemma3, method, **params))
    assert config["rope_theta"] == config["rope_parameters"]["full_attention"]["rope_theta"]
    assert config["rope_local_base_freq"] == config["rope_parameters"]["sliding_attention"]["rope_theta"] == 1e4


def test_a_ramp_that_is_not_truncated(gemma3, patched, config_of, live, assert_inspection_is_live):
    """Where ropes are nested, transformers 5 looks for truncate beside them, and nowhere else."""
    folder, truncated = patched(gemma3, "yarn", truncate=False), patched(gemma3, "yarn")
    assert_inspection_is_live(folder)
    assert config_of(folder)["rope_parameters"]["truncate"] is False
    tables = [live(one)["full_attention"].inv_freq for one in (folder, truncated)]
    assert not np.array_equal(*tables), "the test's ramp begins and ends at whole pairs"


def test_the_pretraining_window_is_that_of_the_layers_that_are_scaled(olmo3, edited):
    """The sliding layers name none of their own; max_position_embeddings is the extended one."""
    yarn = {"rope_type": "yarn", "factor": 8.0, "rope_theta": 5e5, "original_max_position_embeddings": 64}
    ropes = {"sliding_attention": {"rope_type": "default", "rope_theta": 5e5}, "full_attention": yarn}
    source = open_checkpoint(edited(olmo3, max_position_embeddings=512, rope_parameters=ropes))
    plan = make_plan(source, ScalingSpec("yarn", 1.0), target_length=1024)
    assert plan.spec.factor == 16.0
    assert plan.config["rope_parameters"]["full_attention"]["original_max_position_embeddings"] == 64


@pytest.mark.parametrize("name", ["gemma2", "vaultgemma"])
def test_a_sliding_window_of_half_the_layers_is_no_cause_for_a_warning(name, build):
    """The other half attends as far as there is text."""
    model = build(name, head_dim=32, layer_types=LAYERS, sliding_window=32)
    assert make_plan(open_checkpoint(model), ScalingSpec("yarn", 4.0)).warnings == ()
