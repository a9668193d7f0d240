"""A checkpoint patched on disk, with its proof; and what stock transformers builds from a folder's config.json."""

import json
from pathlib import Path

import pytest


@pytest.fixture
def patched(tmp_path):
    """patched(folder, "yarn", 4.0, beta_fast=64.0) -> the folder written, proved against the live model."""
    from ropecli.checkpoint.plan import make_plan
    from ropecli.checkpoint.reading import open_checkpoint
    from ropecli.checkpoint.writing import patch_to
    from ropecli.rope import ScalingSpec

    def patch(folder: Path, method: str, factor: float = 4.0, *, original_length: int | None = None, **params) -> Path:
        output = tmp_path / f"patched-{len(list(tmp_path.glob('patched-*')))}"
        spec = ScalingSpec(method, factor, params)
        patch_to(make_plan(open_checkpoint(folder), spec, original_length=original_length), output)
        return output

    return patch


@pytest.fixture
def config_of():
    return lambda folder: json.loads((folder / "config.json").read_text())


@pytest.fixture
def live():
    """live(folder) -> by layer type, the rotary table of the model that stock transformers builds from config.json."""
    from ropecli.checkpoint.live import rotary_tables
    from ropecli.checkpoint.proof import build_without_weights

    return lambda folder: {table.layer_type: table for table in rotary_tables(build_without_weights(folder))}
