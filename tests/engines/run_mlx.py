"""Runs where mlx-lm is, and knows nothing of ropecli: HOME/job.json, names of folders in HOME -> HOME/logits.npz.

Each folder has tokens.npy. The logits are mlx-lm's, in float32, in one pass; or none where it fails.
"""

import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model


def logits(folder: Path) -> np.ndarray:
    model, _ = load_model(folder)
    model.set_dtype(mx.float32)
    tokens = mx.array(np.load(folder / "tokens.npy")[None])
    return np.array(model(tokens).astype(mx.float32))[0]


if __name__ == "__main__":
    home = Path(sys.argv[1])
    arrays = {name: logits(home / name) for name in json.loads((home / "job.json").read_text())}
    np.savez(home / "logits.npz", **arrays)
