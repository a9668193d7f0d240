"""The embedded checkpoint is small and safe; that it fails beyond its window is seen in evaluation/test_recall.py."""

import torch
from safetensors import safe_open

from ropecli.demo import FOLDER


def test_its_weights_are_bfloat16_safetensors_and_small():
    with safe_open(FOLDER / "model.safetensors", "pt") as weights:
        assert {weights.get_tensor(key).dtype for key in weights.keys()} == {torch.bfloat16}  # noqa: SIM118
    assert not [path.name for path in FOLDER.iterdir() if path.suffix in {".bin", ".pt", ".pth", ".pkl"}]
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) <= 12 * 2**20
