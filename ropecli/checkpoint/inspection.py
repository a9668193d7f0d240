"""What config.json says of a checkpoint's positions, as plain numbers. Loads neither torch nor transformers."""

import math
from typing import Any

import numpy as np

from ropecli.checkpoint.plan import effective_ropes
from ropecli.checkpoint.reading import Checkpoint
from ropecli.rope import ScaledRope


def inspect_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    """The report of `ropecli inspect`: the fields of the rope that sees the whole context, and all of them in `ropes`.

    Lengths and wavelengths in tokens, inv_freq in radians per token.
    """
    ropes, settings = effective_ropes(checkpoint)
    reports = [_describe(rope) for rope in ropes.values()]
    main = max(reports, key=lambda report: (report["factor"], report["layer_type"] == "full_attention"))
    shared = {key: value for key, value in main.items() if key != "layer_type"}
    tokenizer = checkpoint.tokenizer_config or {}
    return {
        "checkpoint": checkpoint.name,
        "model_type": checkpoint.config.get("model_type"),
        "max_position_embeddings": settings.max_position_embeddings,
        "tokenizer_model_max_length": tokenizer.get("model_max_length"),
        **shared,
        "ropes": reports,
        "warnings": list(settings.warnings),
    }


def _describe(rope: ScaledRope) -> dict[str, Any]:
    geometry = rope.geometry
    window = geometry.original_max_position_embeddings
    turning = rope.wavelength[np.isfinite(rope.wavelength)]
    return {
        "layer_type": geometry.layer_type,
        "head_dim": geometry.head_dim,
        "rotary_dim": geometry.rotary_dim,
        "rope_theta": rope.rope_theta,
        "original_max_position_embeddings": window,
        "method": rope.spec.method,
        "factor": rope.spec.factor,
        "params": dict(rope.spec.params),
        "attention_factor": rope.attention_factor,
        "shortest_wavelength": float(turning.min()) if turning.size else None,
        "longest_wavelength": float(turning.max()) if turning.size else None,
        "pairs": len(rope.inv_freq),
        "pairs_turning_in_original_window": int((geometry.inv_freq() * window >= 2 * math.pi).sum()),
        "inv_freq": rope.inv_freq.tolist(),
    }
