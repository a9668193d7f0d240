"""The config.json of released checkpoints, fewer and narrower layers apart: nothing is found but what is there, and
their frequencies are those that stock transformers makes of them."""

import json
from pathlib import Path

import numpy as np
import pytest

from ropecli.checkpoint.inspection import inspect_checkpoint
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.checkpoint.patch_plan import make_plan
from ropecli.checkpoint.state import read_state
from ropecli.scaling.spec import make_spec

CONFIGS = json.loads(Path(__file__).with_name("released.json").read_text())
SMALL = {"vocab_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
SMALL |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
FOUND = {
    "Qwen2.5-7B-Instruct with yarn": ["context-below-scaling"],
    "Phi-3-mini-128k": ["switches-with-length"],
    "vicuna-7b-v1.5-16k": ["no-pretraining-length"],
}


@pytest.fixture
def released(written):
    """released("Llama-3.1-8B", key=value, ...) -> the folder of its config.json; a value of ... removes."""

    def write(name: str, **values: object) -> Path:
        config = {**SMALL, **CONFIGS[name], **values}
        return written({key: value for key, value in config.items() if value is not ...})

    return write


OLMO3 = pytest.mark.transformers("5.14", "olmo3 has one set of RoPE fields")


NEW = dict.fromkeys(
    ("DeepSeek-V4-Flash", "MiMo-V2-Flash", "Step-3.7-Flash"), pytest.mark.transformers("5.23", "the type is unknown")
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=OLMO3 if "Olmo-3" in name else NEW.get(name, ())) for name in CONFIGS]
)
def test_released_configs_have_only_true_findings_and_the_ropes_of_stock_transformers(name, released, live):
    folder = released(name)
    report = inspect_checkpoint(read_state(open_checkpoint(folder)))
    assert [finding["rule"] for finding in report["findings"]] == FOUND.get(name, [])
    ropes = read_state(open_checkpoint(folder)).positions.ropes
    tables = live(folder)
    assert set(ropes) == set(tables)
    for label, table in tables.items():
        rope = ropes[label]
        window = round(rope.geometry.original_max_position_embeddings * rope.spec.factor)
        inv_freq, attention_factor = table.at_length(window)
        np.testing.assert_allclose(rope.inv_freq, inv_freq, rtol=2e-6)
        assert rope.attention_factor == pytest.approx(attention_factor, rel=1e-9)


@pytest.mark.transformers("5.23", "deepseek_v4 is unknown")
def test_a_yarn_that_does_not_scale_the_logits_stays_so(released):
    plan = make_plan(open_checkpoint(released("DeepSeek-V4-Flash")), make_spec("yarn", 32.0))
    assert plan.positions.ropes["compress"].attention_factor == 1.0
    assert not any("attention factor" in finding.message for finding in plan.findings)


def test_a_base_that_transformers_does_not_read_is_written_where_it_does(released, patched, live):
    source = released("MiMo-V2-Flash", swa_rope_theta=20000)
    warning = "swa_rope_theta is 20000, but transformers 5 ignores it in mimo_v2_flash and uses 10000."
    assert any(warning in finding.message for finding in read_state(open_checkpoint(source)).findings)
    (before, after) = (live(folder)["sliding_attention"].inv_freq for folder in (source, patched(source, "linear")))
    assert before[1] == pytest.approx(1e4 ** (-1 / 32), rel=2e-6)
    assert after[1] == pytest.approx(2e4 ** (-1 / 32), rel=2e-6)


@pytest.mark.transformers("5.23", "step3p5 is unknown")
def test_a_list_of_bases_is_written_for_the_layers_that_are_extended(released, patched, config_of):
    folder = patched(released("Step-3.7-Flash"), "abf", 4.0, rope_theta=9e6)  # proved
    assert config_of(folder)["text_config"]["rope_theta"] == [9e6, 1e4, 9e6]


def test_queries_that_grow_with_the_position_keep_the_pretraining_length(released, patched, config_of):
    """Ministral 3's attention reads it whatever the rope_type: queries grow with position // length."""
    parameters = config_of(patched(released("Ministral-3-8B"), "linear", 4.0))["rope_parameters"]
    released_ones = CONFIGS["Ministral-3-8B"]["rope_parameters"]
    for key in ("llama_4_scaling_beta", "original_max_position_embeddings"):
        assert parameters[key] == released_ones[key]


def test_an_absent_head_dim_that_transformers_reads_as_null_is_written(released, patched, config_of):
    """Mixtral's config.json has none; transformers 5 then multiplies null."""
    assert config_of(patched(released("Mixtral-8x7B"), "yarn"))["head_dim"] == 128
