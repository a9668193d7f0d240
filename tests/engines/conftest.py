"""Shared by the tests of `ropecli export`: the demo checkpoint patched ×4, and folders with only a config.json."""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from tiny_settings import MULTIMODAL

import ropecli
from ropecli import demo
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


@pytest.fixture(scope="session")
def qwen(build, tmp_path_factory):
    """qwen("qwen3_5") -> folder of a tiny model for 256 tokens, with the demo's tokenizer; qwen("qwen3_5", 4): yarn ×4.

    Qwen3.5 is multimodal, and has the weights of a layer that drafts, which transformers does not load.
    """
    from safetensors.torch import load_file, save_file

    made = {}

    def make(model_type: str, factor: float = 1) -> Path:
        if (model_type, factor) not in made and factor > 1:
            made[model_type, factor] = tmp_path_factory.mktemp("qwen") / "patched"
            source = str(make(model_type))
            ropecli.patch(source, method="yarn", factor=factor, output=made[model_type, factor], weights="copy")
        elif (model_type, factor) not in made:
            sizes = {"max_position_embeddings": WINDOW, "vocab_size": 2048}
            text = {**MULTIMODAL.get(model_type, {}).get("text_config", {}), **sizes}
            settings = {"text_config": text} if model_type in MULTIMODAL else {**text, "head_dim": 32}
            folder = made[model_type, factor] = build(model_type, **settings)
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copyfile(demo.FOLDER / name, folder / name)
            if model_type in MULTIMODAL:
                weights, layer = load_file(folder / "model.safetensors"), "model.language_model.layers.1."
                draft = {f"mtp.layers.0.{n.removeprefix(layer)}": t for n, t in weights.items() if n.startswith(layer)}
                norm = weights["model.language_model.norm.weight"]
                names = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
                draft |= {f"mtp.{name}.weight": norm.clone() for name in names}
                draft["mtp.fc.weight"] = weights["lm_head.weight"][:64].repeat(1, 2)
                save_file(draft, folder / "model-mtp.safetensors", metadata={"format": "pt"})
        return made[model_type, factor]

    return make
