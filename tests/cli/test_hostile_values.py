"""Values of every kind in every field that is read: a report, or one message; never a traceback."""

import json

import pytest

from ropecli.checkpoint.inspection import inspect_checkpoint
from ropecli.checkpoint.plan import make_plan
from ropecli.checkpoint.reading import Checkpoint
from ropecli.errors import RopecliError
from ropecli.rope import RopeGeometry, ScalingSpec
from ropecli.scaling.registry import scale

VALUES = [
    None, True, False, 0, 1, -1, 3, 0.5, 1e308, 1e-308, 10**16, -(10**30), 10**400,
    float("nan"), float("inf"), "", "4", "yarn", "\ud800", "ünï\x1b[31m\n", "a" * 5000,
    [], [1], ["a"], [None], [[1]], [{"a": 1}], [0] * 5, [float("nan")] * 16, ["sliding_attention"],
    {}, {"a": 1}, {"0": 5}, {"²": {"head_dim": 16}}, {"9" * 5000: {"head_dim": 16}}, {"0": {"head_dim": "x"}},
    {"full_attention": None}, {"full_attention": {"rope_type": [1]}}, {"full_attention": {"factor": "x"}},
]  # fmt: skip
SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "head_dim": 32,
    "rope_theta": 1e4,
}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
NEST = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": YARN}
LISTS = {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
CONFIGS = {
    "both dialects": {**SIZES, "model_type": "mixtral", "rope_parameters": YARN, "rope_scaling": YARN},
    "longrope": {**SIZES, "model_type": "phi3", "rope_scaling": LISTS, "original_max_position_embeddings": 64},
    "nested": {**SIZES, **LAYERS, "model_type": "gemma3_text", "rope_parameters": NEST},
    "mixed": {**SIZES, **LAYERS, "model_type": "cohere2"},
    "composite": {"model_type": "gemma3", "text_config": {**SIZES, **LAYERS, "model_type": "gemma3_text"}},
    "of bases": {**SIZES, "model_type": "granite", "layer_rope_theta": [1e4, 0]},
    "its own": {**SIZES, "model_type": "own", "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
}
FIELDS = [
    "model_type",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "rope_theta",
    "rope_local_base_freq",
    "layer_rope_theta",
    "partial_rotary_factor",
    "rope_parameters",
    "rope_scaling",
    "head_dim",
    "hidden_size",
    "num_attention_heads",
    "qk_rope_head_dim",
    "sliding_window",
    "use_sliding_window",
    "layer_types",
    "per_layer_config",
    "text_config",
    "attn_config",
]
PARAMETERS = [
    *YARN,
    "type",
    "beta_fast",
    "beta_slow",
    "truncate",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "short_factor",
    "long_factor",
    "partial_rotary_factor",
    "betafast",
    "ünï\x1b[31m",
]
COMMANDS = [
    ["inspect"],
    ["inspect", "--json"],
    ["patch", "-m", "yarn", "--factor", 4, "--dry-run"],
    ["patch", "-m", "p-rope", "--target-length", 4096, "--dry-run", "--json"],
]


@pytest.fixture
def harmless(tmp_path):
    """harmless(config): a report and a plan, or a RopecliError of few words; nothing else is raised."""

    def call(config: dict) -> None:
        checkpoint = Checkpoint("hostile", tmp_path, json.loads(json.dumps(config)))
        for attempt in (inspect_checkpoint, lambda one: make_plan(one, ScalingSpec("yarn", 4.0))):
            message = ""
            try:
                attempt(checkpoint)
            except RopecliError as error:
                message = str(error)
            assert len(message) < 600, config

    return call


@pytest.fixture
def one_message_at_most(ropecli, tmp_path):
    """one_message_at_most(config): so does the command line, and it sends the terminal no command."""

    def call(config: dict) -> None:
        (tmp_path / "config.json").write_text(json.dumps(config))
        for name, *options in COMMANDS:
            outcome = ropecli(name, tmp_path, *options)
            assert outcome.code in (0, 2), config
            assert outcome.err.count("error:") == (outcome.code == 2), config
            assert "\x1b" not in outcome.out + outcome.err, config
            if outcome.code == 0 and "--json" in options:
                json.loads(outcome.out)
            if outcome.code == 2:
                assert outcome.out == ""

    return call


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("field", FIELDS)
def test_a_field(name, field, harmless):
    config = CONFIGS[name]
    for value in VALUES:
        if name == "composite" and field != "text_config":
            harmless({**config, "text_config": {**config["text_config"], field: value}})
        else:
            harmless({**config, field: value})


@pytest.mark.parametrize("name", ["both dialects", "longrope", "nested", "its own"])
@pytest.mark.parametrize("key", PARAMETERS)
def test_a_parameter(name, key, harmless):
    config = CONFIGS[name]
    for value in VALUES:
        if name == "nested":
            harmless({**config, "rope_parameters": {**NEST, "full_attention": {**YARN, key: value}}})
        else:
            harmless({**config, "rope_scaling": {**config["rope_scaling"], key: value}})


@pytest.mark.parametrize("field", ["model_type", "rope_theta", "layer_types", "rope_scaling"])
@pytest.mark.parametrize("value", ["\ud800", "ünï\x1b[31m\n", ["\x1b[31m"], {"\x1b[31m": 1}, float("nan"), "a" * 5000])
def test_what_a_terminal_would_obey_is_not_sent(value, field, one_message_at_most):
    one_message_at_most({**CONFIGS["mixed"], field: value})
    one_message_at_most({**CONFIGS["both dialects"], field: value})


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_a_tokenizers_length(value, one_message_at_most, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": value}))
    one_message_at_most(CONFIGS["both dialects"])


@pytest.mark.parametrize("factor", ["1.0e+308", "-4.0", ".nan", ".inf", "0.0", "[4]", "x"])
def test_a_note_of_an_impossible_factor(factor, llama, ropecli, tmp_path):
    assert ropecli("patch", llama, "-m", "yarn", "--factor", 4, "--no-verify", "-o", tmp_path / "out").code == 0
    note = (tmp_path / "out" / "ropecli.yaml").read_text()
    assert "factor: 4.0" in note
    (tmp_path / "out" / "ropecli.yaml").write_text(note.replace("factor: 4.0", f"factor: {factor}"))
    for command in COMMANDS[:3]:
        outcome = ropecli(command[0], tmp_path / "out", *command[1:])
        assert (outcome.code, outcome.out) == (2, "")
        assert "ropecli.yaml cannot be read" in outcome.err


@pytest.mark.parametrize(("name", "values"), [("beta_slow", (1e-308, 1e-30)), ("beta_fast", (1e30, 1e20))])
def test_a_ramp_that_ends_far_beyond_all_pairs(name, values):
    """Its end is clamped to the pairs there are, however far away it is."""
    geometry = RopeGeometry(32, 32, 1e4, 64)
    one, other = (scale(geometry, ScalingSpec("yarn", 4.0, {name: value})).inv_freq for value in values)
    assert one.tolist() == other.tolist()
