"""Options of `ropecli patch` that are for some models, methods and windows alone."""

import json

import numpy as np
import pytest

LAYERS = ["sliding_attention", "full_attention"]
FACTORS = [1.0 + index / 4 for index in range(16)]


@pytest.fixture
def patch(ropecli, tmp_path):
    """patch(source, "--method", "yarn", ...) -> (config.json as written, outcome)."""

    def call(checkpoint, *arguments):
        output = tmp_path / f"out-{len(list(tmp_path.glob('out-*')))}"
        outcome = ropecli("patch", checkpoint, *arguments, "-o", output)
        assert outcome.code == 0, outcome.err
        return json.loads((output / "config.json").read_text()), outcome

    return call


@pytest.fixture(scope="module")
def gemma(build):
    return build("gemma3_text", head_dim=32, layer_types=LAYERS, sliding_window=32)


# --factor and --target-length.


@pytest.mark.parametrize(("factor", "short"), [(8, False), (2, True)])
def test_a_factor_beside_a_target_is_kept(factor, short, patch, llama):
    config, outcome = patch(llama, "--method", "yarn", "--factor", factor, "--target-length", 256)
    assert config["max_position_embeddings"] == 256
    assert config["rope_parameters"]["factor"] == config["rope_scaling"]["factor"] == factor
    assert f"yarn ×{factor}, 256 tokens" in outcome.out
    assert ("reaches 128 tokens; 256 tokens require factor 4" in outcome.err) is short


# --layer-types.


def methods_of(config: dict) -> dict[str, str]:
    return {label: parameters["rope_type"] for label, parameters in config["rope_parameters"].items()}


@pytest.mark.parametrize(
    ("chosen", "scaled"),
    [
        ("sliding_attention", {"sliding_attention"}),
        ("full_attention,sliding_attention", set(LAYERS)),
    ],
)
def test_the_chosen_layers_are_scaled_and_proved(chosen, scaled, patch, gemma):
    config, outcome = patch(gemma, "--method", "linear", "--factor", 4, "--layer-types", chosen)
    assert {label for label, method in methods_of(config).items() if method == "linear"} == scaled
    assert "Proved: in stock transformers, 2 rotary tables match" in outcome.out
    assert ("only see nearby tokens" in outcome.err) is ("sliding_attention" in scaled)


def test_without_it_those_are_scaled_that_see_far(patch, gemma):
    config, outcome = patch(gemma, "--method", "linear", "--factor", 4)
    assert methods_of(config) == {"full_attention": "linear", "sliding_attention": "default"}
    assert outcome.err == ""


# --factors-file.


@pytest.fixture
def file(tmp_path):
    def write(value: object):
        path = tmp_path / "numbers.json"
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        return path

    return write


@pytest.mark.parametrize(
    "value", [FACTORS, {"factors": FACTORS}, {"inv_freq": (1e4 ** (-np.arange(16) / 16) / FACTORS).tolist()}]
)
def test_numbers_of_ones_own_are_written_as_longrope(value, patch, file, llama):
    config, _ = patch(llama, "--method", "custom", "--factor", 4, "--factors-file", file(value))
    parameters = config["rope_parameters"]
    assert parameters["rope_type"] == "longrope"
    assert parameters["short_factor"] == parameters["long_factor"] == pytest.approx(FACTORS, rel=1e-12)
    assert parameters["attention_factor"] == 1.0


def test_longrope_takes_what_a_config_has(patch, file, gemma, tmp_path):
    """So that a command which inspect prints has no need to name 64 numbers."""
    numbers = {"long_factor": FACTORS, "short_factor": FACTORS, "attention_factor": 1.5}
    written, _ = patch(gemma, "--method", "longrope", "--factor", 4, "--factors-file", file(numbers))
    again, _ = patch(gemma, "--method", "longrope", "--factor", 4, "--factors-file", tmp_path / "out-0" / "config.json")
    assert again["rope_parameters"] == written["rope_parameters"]


def test_a_factor_and_a_window_of_their_own_for_a_type_that_reads_two_lists_alone(ropecli, build, tmp_path):
    """Phi-3's older dialect has no word for the factor: a reader takes the windows' ratio for it."""
    phi3 = build("phi3", original_max_position_embeddings=64)
    factors = f"long_factor={[1.0 + index / 4 for index in range(16)]}"
    arguments = ["--method", "longrope", "--factor", 4, "--target-length", 512, "--set", factors]
    outcome = ropecli("patch", phi3, *arguments, "-o", tmp_path / "out")
    assert outcome.code == 0, outcome.err
    assert "the formulas" in outcome.out
