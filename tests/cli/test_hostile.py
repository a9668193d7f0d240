"""Checkpoints from strangers: nothing in them runs, no private file is read, and no value leads to a traceback."""

import json
import pickle
from pathlib import Path

import pytest

from ropecli.checkpoint.inspection import inspect_checkpoint
from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.patch_plan import make_plan
from ropecli.checkpoint.state import read_state
from ropecli.errors import RopecliError
from ropecli.scaling.spec import make_spec

PATCH = ["--method", "yarn", "--factor", 4]


def rewrite(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


class Canary:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (open, (str(self.path), "w"))


def test_pickled_weights_are_not_opened(source, ropecli, tmp_path, corpus):
    canary, name = tmp_path / "canary", "pytorch_model.bin"
    (source / name).write_bytes(pickle.dumps(Canary(canary)))
    ropecli("patch", source, *PATCH, "-o", tmp_path / "beside").succeeds()
    assert not (tmp_path / "beside" / name).exists()
    (source / "model.safetensors").unlink()
    refused = ropecli("patch", source, *PATCH, "-o", tmp_path / "out")
    refused.is_refused(f"{name} is a pickle, which is not supported")
    ropecli("eval-ppl", source, "-d", corpus, "-l", 64).is_refused("is a pickle")
    assert not canary.exists()


@pytest.mark.parametrize("known", [True, False], ids=["llama", "unknown"])
def test_code_is_not_run(known, source, ropecli, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    canary = tmp_path / "canary"
    for name in ("configuration_own", "modeling_own", "tokenization_own", "__init__"):
        (source / f"{name}.py").write_text(f"open({str(canary)!r}, 'w')\n")
    maps = {"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}
    rewrite(source / "config.json", auto_map=maps, **({} if known else {"model_type": "own"}))
    rewrite(source / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_own.Own", None]})
    outcomes = [
        ropecli("inspect", source),
        ropecli("patch", source, "--method", "yarn", "--factor", 4, "-o", "out"),
        ropecli("eval-ppl", source, "-l", "64", "--max-documents", 1, "-d", corpus),
    ]
    assert all(outcome.code in (0, 2) and "Traceback" not in outcome.err for outcome in outcomes)
    if known:
        assert [outcome.code for outcome in outcomes[:2]] == [0, 0]
        assert ropecli("revert", "out", "-o", "back").code == 0
        assert (tmp_path / "back" / "modeling_own.py").is_file()
    assert not canary.exists()


# Values.


VALUES = [
    None,
    True,
    -1,
    0.5,
    10**400,
    float("nan"),
    "4",
    "\ud800",
    "a" * 5000,
    [],
    [None],
    {},
    {"a": 1},
    {"0": {"a": "x"}},
]
SIZES = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 256, "head_dim": 32, "rope_theta": 1e4}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
NEST = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": YARN}
CONFIGS = {
    "both dialects": {**SIZES, "model_type": "mixtral", "rope_parameters": YARN, "rope_scaling": YARN},
    "nested": {**SIZES, **LAYERS, "model_type": "gemma3_text", "rope_parameters": NEST},
}
OTHER_FIELDS = ["original_max_position_embeddings", "partial_rotary_factor", "qk_rope_head_dim", "sliding_window"]
OTHER_FIELDS += ["layer_types", "per_layer_config", "text_config", "rope_local_base_freq", "layer_rope_theta"]
PARAMETERS = [*YARN, "beta_fast", "truncate", "attention_factor", "mscale_all_dim", "long_factor", "betafast"]


@pytest.mark.parametrize("name", CONFIGS)
def test_values_of_every_kind_in_every_field_that_is_read(name, tmp_path):
    """A report and a plan, or a RopecliError of few words; nothing else is raised."""
    config = CONFIGS[name]
    nest = "rope_parameters" if name == "nested" else "rope_scaling"
    changed = [{**config, field: value} for field in [*config, *OTHER_FIELDS] for value in VALUES]
    for key in PARAMETERS:
        for value in VALUES:
            inside = {**NEST, "full_attention": {**YARN, key: value}}
            changed.append({**config, nest: inside if name == "nested" else {**config[nest], key: value}})
    for one in changed:
        checkpoint = Checkpoint("hostile", tmp_path, json.loads(json.dumps(one)))
        for attempt in (
            lambda it: inspect_checkpoint(read_state(it)),
            lambda it: make_plan(it, make_spec("yarn", 4.0)),
        ):
            message = ""
            try:
                attempt(checkpoint)
            except RopecliError as error:
                message = str(error)
            assert len(message) < 600, one


FIELDS = {
    "negative": ({"num_key_value_heads": -1}, "num_key_value_heads in config.json is -1; expected a positive integer"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers in config.json is 0; expected an integer from 1 to"),
    "not finite": ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor in config.json is nan"),
    "no list": ({"architectures": 5}, "architectures in config.json is 5; expected a list of names"),
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_is_refused_by_its_name(name, ropecli, tmp_path):
    fields, *parts = FIELDS[name]
    config = {**CONFIGS["both dialects"], "num_hidden_layers": 2, **fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ropecli("inspect", tmp_path).is_refused(*parts)


@pytest.mark.parametrize("value", ["ünï\x1b[31m\n", ["\x1b[31m"], {"\x1b[31m": 1}], ids=["text", "list", "key"])
@pytest.mark.parametrize("field", ["model_type", "rope_scaling"])
def test_what_a_terminal_would_obey_is_not_sent(value, field, ropecli, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS["both dialects"], field: value}))
    for command in (["inspect"], ["patch", "--method", "yarn", "--factor", 4, "--dry-run"]):
        outcome = ropecli(command[0], tmp_path, *command[1:])
        assert outcome.code in (0, 2)
        assert "\x1b" not in outcome.out + outcome.err
