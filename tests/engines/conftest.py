"""Shared by the tests of `ropecli export`: the demo checkpoint patched ×4, and folders with only a config.json."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import ropecli
from ropecli.attention.patching import patch_to

WINDOW, TARGET = 256, 1024
FACTORS = np.geomspace(1, 8, 16).tolist()
PATCHES = {
    "none": {},
    "linear": {},
    "ntk": {},
    "dynamic": {},
    "ntk-by-parts": {},
    "yarn": {},
    "yarn with its own attention factor": {"attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0},
    "llama3": {},
    "longrope": {"long_factor": FACTORS},
    "longrope with its own attention factor": {"long_factor": [*FACTORS[:-1], 1e30], "attention_factor": 1.1},
}


class Patched(NamedTuple):
    folder: Path
    rope: object
    checkpoint: object


def pytest_generate_tests(metafunc):
    if "patch" in metafunc.fixturenames:
        metafunc.parametrize("patch", PATCHES)


@pytest.fixture(scope="session")
def patched(tmp_path_factory):
    """patched(name of PATCHES, **more parameters) -> Patched(folder, ScaledRope, checkpoint)."""
    made = {}

    def make(patch: str, **params: object) -> Patched:
        key = (patch, repr(params))
        if key not in made:
            spec = ropecli.make_spec(patch.partition(" ")[0], TARGET / WINDOW, {**PATCHES[patch], **params})
            plan = ropecli.make_plan(ropecli.open_checkpoint("demo"), spec)
            folder = tmp_path_factory.mktemp("patched") / "checkpoint"
            patch_to(plan, folder, verify=False)
            made[key] = Patched(folder, plan.positions.ropes[None], ropecli.open_checkpoint(folder))
        return made[key]

    return make


@pytest.fixture
def config_only(tmp_path):
    """config_only(key=value, ...) -> a checkpoint that is a config.json; a small Llama's fields unless given."""

    def make(**fields: object):
        small = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 64}
        config = {"model_type": "llama", "max_position_embeddings": WINDOW, "rope_theta": 10000.0, **small, **fields}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return ropecli.open_checkpoint(tmp_path)

    return make


@pytest.fixture
def patched_model(build, tmp_path):
    """patched_model(model_type, method, layer_types, **params) -> a tiny model of that type, patched ×4."""

    def make(model_type: str, method: str, layer_types: list[str] | None = None, **params: object):
        source = ropecli.open_checkpoint(build(model_type, head_dim=32))
        plan = ropecli.make_plan(source, ropecli.make_spec(method, 4.0, params), layer_types=layer_types)
        patch_to(plan, tmp_path / "patched", verify=False)
        return ropecli.open_checkpoint(tmp_path / "patched")

    return make


@pytest.fixture(scope="session")
def transformers_logits():
    """transformers_logits(folder, tokens) -> the logits of stock transformers in one pass, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    def read(folder: Path, tokens: list[int] | np.ndarray) -> np.ndarray:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            return model(input_ids=torch.tensor(tokens)[None], use_cache=False).logits[0].numpy()

    return read
