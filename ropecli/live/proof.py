"""Proof that a written patch took effect.

Stock transformers builds the model from the written config, without weights, and every rotary table is compared with
our own float64 mathematics.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ropecli.errors import ProofError
from ropecli.scaling.scale import scale, varies_with_length
from ropecli.scaling.spec import ScaledRope

# transformers computes in float32; its powers differ from our casts by a few units in the last place.
_RELATIVE = 2e-6
# If a method mixes two frequencies, its float32 error is relative to the larger, unscaled one.
_RELATIVE_TO_BASE = 2e-7
# Radians per token. longrope's factor of 1e30 leaves about 1e-33 for pairs that should not rotate.
_STILL = 1e-25


def prove(folder: Path, ropes: Mapping[str | None, ScaledRope]) -> int:
    """Compare every rotary table with `ropes` (by layer type). Returns the number of tables.

    Methods that depend on the length are compared at length 1, at the pretraining length, one token beyond it, and at
    the target length. Raises ProofError with the name of the module and the difference.
    """
    from ropecli.live.rotary import rotary_tables
    from ropecli.live.stock_transformers import build_without_weights

    tables = rotary_tables(build_without_weights(folder))
    for table in tables:
        rope = ropes.get(table.layer_type)
        if rope is None:
            raise ProofError(
                f"{table.name}: the live model has layers of type {table.layer_type!r}, but config.json does not."
            )
        if not varies_with_length(rope):
            _compare(table.name, table.inv_freq, table.attention_factor, rope)
            continue
        pretrained = rope.geometry.original_max_position_embeddings
        for length in (1, pretrained, pretrained + 1, rope.scaled_length):
            expected = scale(rope.geometry, rope.spec, length)
            _compare(f"{table.name} at length {length}", *table.at_length(length), expected)
    return len(tables)


def _compare(name: str, inv_freq: np.ndarray, attention_factor: float, rope: ScaledRope) -> None:
    if inv_freq.shape != rope.inv_freq.shape:
        raise ProofError(f"{name}: the live module has {inv_freq.size} rotary pairs, the patch {rope.inv_freq.size}.")
    error = np.abs(inv_freq - rope.inv_freq)
    allowed = _RELATIVE * rope.inv_freq + _RELATIVE_TO_BASE * rope.geometry.inv_freq() + _STILL
    if (error > allowed).any():
        pair = int((error / allowed).argmax())
        relative = error[pair] / max(rope.inv_freq[pair], np.finfo(np.float32).tiny)
        raise ProofError(
            f"{name}: pair {pair} rotates by {inv_freq[pair]:.6g} radians per token in the live module, but by "
            f"{rope.inv_freq[pair]:.6g} in the patch (relative difference {relative:.2g}). "
            "Stock transformers does not implement this config as expected."
        )
    if abs(attention_factor - rope.attention_factor) > _RELATIVE * rope.attention_factor:
        raise ProofError(
            f"{name}: the live attention factor is {attention_factor:.6g}, the patch's {rope.attention_factor:.6g}. "
            "Stock transformers does not implement this config as expected."
        )
