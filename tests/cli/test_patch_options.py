"""Options of `ropecli patch` that are for some models and methods: layer types, files of factors, distance methods."""

import json

import numpy as np
import pytest
import yaml

LAYERS = ["sliding_attention", "full_attention"]
FACTORS = [1.0 + index / 4 for index in range(16)]
PROVED = "Proved: on a small model of this architecture, the attention computes what transformers' own does."


@pytest.fixture
def patch(ropecli, tmp_path, config_of):
    """patch(source, "--method", "yarn", ...) -> (config.json as written, outcome)."""

    def call(checkpoint, *arguments):
        output = tmp_path / f"out-{len(list(tmp_path.glob('out-*')))}"
        outcome = ropecli("patch", checkpoint, *arguments, "-o", output).succeeds()
        return config_of(output), outcome

    return call


@pytest.fixture(scope="module")
def gemma(build):
    return build("gemma3_text", head_dim=32, layer_types=LAYERS, sliding_window=32)


@pytest.mark.parametrize(("factor", "short"), [(8, False), (2, True)])
def test_a_factor_beside_a_target_is_kept(factor, short, patch, llama):
    config, outcome = patch(llama, "--method", "yarn", "--factor", factor, "--target-length", 256)
    assert config["max_position_embeddings"] == 256
    assert config["rope_parameters"]["factor"] == config["rope_scaling"]["factor"] == factor
    assert f"yarn ×{factor}, 256 tokens" in outcome.out
    assert ("reaches 128 tokens; 256 tokens require factor 4" in outcome.err) is short


@pytest.mark.parametrize("chosen", [None, "sliding_attention", "full_attention,sliding_attention"])
def test_the_chosen_layers_are_scaled_and_proved(chosen, patch, gemma):
    scaled = set(chosen.split(",")) if chosen else {"full_attention"}
    options = ["--layer-types", chosen] if chosen else []
    config, outcome = patch(gemma, "--method", "linear", "--factor", 4, *options)
    assert {label for label, rope in config["rope_parameters"].items() if rope["rope_type"] == "linear"} == scaled
    assert "Proved: in stock transformers, 2 rotary tables match" in outcome.out
    assert ("only see nearby tokens" in outcome.err) is ("sliding_attention" in scaled)


@pytest.mark.parametrize(
    "text", [FACTORS, {"factors": FACTORS}, {"inv_freq": (1e4 ** (-np.arange(16) / 16) / FACTORS).tolist()}]
)
def test_the_users_factors_are_written_as_longrope(text, patch, llama, tmp_path):
    (tmp_path / "numbers.json").write_text(json.dumps(text))
    config, _ = patch(llama, "--method", "custom", "--factor", 4, "--factors-file", tmp_path / "numbers.json")
    parameters = config["rope_parameters"]
    assert parameters["rope_type"] == "longrope"
    assert parameters["short_factor"] == parameters["long_factor"] == pytest.approx(FACTORS, rel=1e-12)
    assert parameters["attention_factor"] == 1.0


def test_longrope_takes_the_factors_of_a_config(patch, gemma, tmp_path):
    """So that a command which inspect prints has no need to name 64 numbers."""
    options = ["--method", "longrope", "--factor", 4]
    lists = ["--set", f"long_factor={FACTORS}", "--set", f"short_factor={FACTORS}", "--set", "attention_factor=1.5"]
    written, _ = patch(gemma, *options, *lists)
    again, _ = patch(gemma, *options, "--factors-file", tmp_path / "out-0" / "config.json")
    assert again["rope_parameters"] == written["rope_parameters"]


def test_a_combination_is_remembered_and_reverted(ropecli, llama, patch, tmp_path, config_of):
    _, outcome = patch(llama, "--method", "yarn+resonance", "--factor", 4, "--set", "beta_fast=8")
    assert "yarn+resonance ×4, 256 tokens" in outcome.out
    assert "Proved: in stock transformers, 1 rotary table matches" in outcome.out
    combined = tmp_path / "out-0"
    record = yaml.safe_load((combined / "ropecli.yaml").read_text())["scaling"]
    assert {"method": "yarn+resonance", "factor": 4.0, "params": {"beta_fast": 8}}.items() <= record.items()
    report = ropecli("inspect", combined, "--json").json()
    assert (report["method"], report["params"]["beta_fast"], report["findings"]) == ("yarn+resonance", 8, [])
    extended, _ = patch(combined, "--method", "yarn+rerope", "--factor", 4)
    assert extended["ropecli_remapping"]["pretrained"] == 2 * 64  # what yarn ×2 reads; rerope extends that
    assert "yarn+rerope" in ropecli("inspect", tmp_path / "out-1").out
    ropecli("revert", tmp_path / "out-1", "-o", tmp_path / "back").succeeds()
    assert config_of(tmp_path / "back") == config_of(llama)


# Distance methods.


@pytest.fixture
def rerope(patch, llama, tmp_path):
    patch(llama, "--method", "rerope", "--factor", 4)
    return tmp_path / "out-0"


def test_a_distance_method_says_what_it_proved_and_what_the_reader_needs(patch, llama):
    _, outcome = patch(llama, "--method", "rerope", "--factor", 4)
    assert "rerope ×4, 256 tokens" in outcome.out
    assert "Proved: in stock transformers, 1 rotary table matches" in outcome.out
    assert PROVED in outcome.out.splitlines()
    assert "after `import ropecli.attention`" in outcome.said
    assert outcome.err.count("warning:") == 1


def test_the_attention_is_proved_without_the_proof_of_the_tables(ropecli, patch, build, llama, tmp_path):
    options = ["--method", "rerope", "--factor", 4, "--no-verify"]
    for folder, reason in (
        (build("smollm3", no_rope_layers=[1, 0]), "do not rotate by the rotary"),
        (build("mistral", head_dim=32, sliding_window=20), "no layer sees further than 20 tokens"),
    ):
        outcome = ropecli("patch", folder, *options, "-o", tmp_path / "out")
        outcome.is_refused(reason)
        assert "warning" not in outcome.err
    assert list(tmp_path.iterdir()) == []
    _, outcome = patch(llama, *options)
    assert "Not proved (--no-verify)" in outcome.out
    assert PROVED in outcome.out.splitlines()


def test_another_attention_is_refused_with_the_way_out(ropecli, llama, rerope, corpus):
    for folder, options in (
        (rerope, ["eval-ppl", "-l", "64"]),
        (rerope, ["needle", "-l", "64"]),
        (llama, ["eval-ppl", "-l", "64", "--baseline", rerope]),
        (llama, ["compare", "-l", "64", "--methods", "none,rerope"]),
    ):
        outcome = ropecli(options[0], folder, *options[1:], "--data", corpus, "--attn", "eager")
        outcome.is_refused("--attn eager would replace", "rerope", "Remove --attn.")
