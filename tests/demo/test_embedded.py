"""The embedded checkpoint: stock software loads it, and beyond its window it fails, which is what it is there for."""

import torch
from safetensors import safe_open

from ropecli.demo import FOLDER


def test_its_weights_are_bfloat16_safetensors_and_small():
    with safe_open(FOLDER / "model.safetensors", "pt") as weights:
        assert {weights.get_tensor(key).dtype for key in weights.keys()} == {torch.bfloat16}  # noqa: SIM118
    assert not [path.name for path in FOLDER.iterdir() if path.suffix in {".bin", ".pt", ".pth", ".pkl"}]
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) <= 12 * 2**20
