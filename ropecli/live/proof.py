"""Proof that a written patch took effect.

Stock transformers builds the model from the written config, without weights, and every rotary table is compared with
our own float64 mathematics.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ropecli.errors import ProofError
from ropecli.scaling.scale import scale, varies_with_length
from ropecli.scaling.spec import ScaledRope

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from ropecli.live.rotary import RotaryTable

# transformers computes in float32; its powers differ from our casts by a few units in the last place.
_RELATIVE = 2e-6
# If a method mixes two frequencies, its float32 error is relative to the larger, unscaled one.
_RELATIVE_TO_BASE = 2e-7
# Radians per token. longrope's factor of 1e30 leaves about 1e-33 for pairs that should not rotate.
_STILL = 1e-25
# Absolute difference of a cos or sin at a position below 10.
_SAME_ANGLE = 1e-5


def prove(
    folder: "Path | PreTrainedConfig", ropes: Mapping[str | None, ScaledRope], original: dict[str, Any] | None = None
) -> int:
    """Compare every rotary table of folder/config.json with `ropes` (by layer type). Returns the number of tables.

    folder: or the config as read by transformers. Methods that depend on the length are compared at length 1, at the
    pretraining length, one token beyond it, and at the target length. original: the unpatched config.json; with mrope,
    every dimension must still rotate by the same axis as there. Raises ProofError with the name of the module and the
    difference.
    """
    from ropecli.live.rotary import rotary_tables
    from ropecli.live.stock_transformers import build_without_weights, stock_config_of

    tables = rotary_tables(build_without_weights(folder))
    before = tables
    if original is not None and any(table.axes > 1 for table in tables):
        before = rotary_tables(build_without_weights(stock_config_of(original)))
    for table, unpatched in zip(tables, before, strict=True):
        rope = ropes.get(table.layer_type)
        if rope is None:
            raise ProofError(
                f"{table.name}: the live model has layers of type {table.layer_type!r}, but config.json does not."
            )
        if table.axes > 1:
            _compare_axes(table, unpatched, rope)
        if not varies_with_length(rope):
            _compare(table.name, table.inv_freq, table.attention_factor, rope)
            continue
        pretrained = rope.geometry.original_max_position_embeddings
        for length in (1, pretrained, pretrained + 1, rope.scaled_length):
            expected = scale(rope.geometry, rope.spec, length)
            _compare(f"{table.name} at length {length}", *table.at_length(length), expected)
    return len(tables)


def _compare_axes(table: "RotaryTable", unpatched: "RotaryTable", rope: ScaledRope) -> None:
    """Compare the cos and sin of a token whose positions on the axes differ, as in an image (mrope)."""
    axes, before = _axes(table), _axes(unpatched)
    if not np.array_equal(axes, before):
        raise ProofError(
            f"{table.name}: the dimensions rotate by the axes {axes.tolist()} in the live module, but by "
            f"{before.tolist()} before the patch. Check mrope_section in config.json."
        )
    positions = np.arange(2, 2 + table.axes)
    if varies_with_length(rope):
        rope = scale(rope.geometry, rope.spec, int(positions.max()) + 1)
    cos_sin = table.angles_at(*positions.tolist())
    for pairs in (np.tile(rope.inv_freq, 2), np.repeat(rope.inv_freq, 2)):  # both layouts that transformers has
        angles = positions[axes] * pairs
        if np.allclose(cos_sin, rope.attention_factor * np.stack([np.cos(angles), np.sin(angles)]), atol=_SAME_ANGLE):
            return
    raise ProofError(f"{table.name}: the cos and sin of a token in an image differ from those of the patch.")


def _axes(table: "RotaryTable") -> np.ndarray:
    """The axis whose position rotates each dimension. Shape (rotary_dim,)."""
    alone = np.eye(table.axes, dtype=int)
    return np.abs([table.angles_at(*row.tolist())[1] for row in alone]).argmax(axis=0)


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
