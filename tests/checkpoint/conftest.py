"""A checkpoint patched on disk, with its proof; and what stock transformers builds from a folder's config.json."""

import json
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(scope="module")
def quiet():
    """Default configurations make transformers talk of token ids beyond their vocabulary."""
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    yield
    transformers_logging.set_verbosity(verbosity)


@pytest.fixture
def patched(tmp_path):
    """patched(folder, "yarn", 4.0, beta_fast=64.0) -> the folder written, proved against the live model."""
    from ropecli.attention.patching import patch_to
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.checkpoint.patch_plan import make_plan
    from ropecli.scaling.spec import make_spec

    def patch(folder: Path, method: str, factor: float = 4.0, *, original_length: int | None = None, **params) -> Path:
        output = tmp_path / f"patched-{len(list(tmp_path.glob('patched-*')))}"
        spec = make_spec(method, factor, params)
        patch_to(make_plan(open_checkpoint(folder), spec, original_length=original_length), output)
        return output

    return patch


@pytest.fixture
def written(tmp_path):
    """written({"model_type": "llama", ...}) -> a folder with that config.json, and weights that nobody reads."""
    from safetensors.numpy import save_file
    from transformers import CONFIG_MAPPING

    from ropecli.config.families import family_of

    def write(config: dict) -> Path:
        if family_of(config).known and config["model_type"] not in CONFIG_MAPPING:
            pytest.skip(f"this release of transformers does not know {config['model_type']}")
        folder = tmp_path / f"written-{len(list(tmp_path.glob('written-*')))}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        save_file({"unused": np.zeros(1, dtype=np.float32)}, folder / "model.safetensors")
        return folder

    return write


@pytest.fixture
def config_of():
    return lambda folder: json.loads((folder / "config.json").read_text())


@pytest.fixture
def live():
    """live(folder) -> by layer type, the rotary table of the model that stock transformers builds from config.json."""
    from ropecli.live.proof import build_without_weights
    from ropecli.live.rotary import rotary_tables

    return lambda folder: {table.layer_type: table for table in rotary_tables(build_without_weights(folder))}


@pytest.fixture
def assert_inspection_is_live(live):
    """Reads no weights: the frequencies that config.json gives us are those it gives transformers."""
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.checkpoint.state import read_state

    def check(folder: Path) -> None:
        ropes = read_state(open_checkpoint(folder)).ropes
        tables = live(folder)
        assert set(ropes) == set(tables)
        for layer_type, table in tables.items():
            np.testing.assert_allclose(ropes[layer_type].inv_freq, table.inv_freq, rtol=2e-6)
            assert ropes[layer_type].attention_factor == pytest.approx(table.attention_factor, rel=1e-9)

    return check
