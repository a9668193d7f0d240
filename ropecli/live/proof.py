"""Proof that config.json was read as stock transformers reads it, and that a written patch took effect.

Stock transformers builds the model from the original and from the written config, without weights, and every rotary
table is compared with our own float64 mathematics.
"""

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ropecli.checkpoint.patch_plan import PatchPlan
from ropecli.config.encoding import write_head_dim
from ropecli.config.fields import section_of
from ropecli.config.settings import read_settings
from ropecli.errors import CheckpointError, MethodError, PatchError, ProofError
from ropecli.live.rotary import FOLLOWS_LENGTH, RotaryTable, rotary_tables
from ropecli.live.skeleton import build_without_weights
from ropecli.live.stock_transformers import stock_config_of
from ropecli.messages import warn
from ropecli.scaling.spec import ScaledRope, scale, varies_with_length

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# transformers computes in float32; its powers differ from our casts by a few units in the last place.
_RELATIVE = 2e-6
# If a method mixes two frequencies, its float32 error is relative to the larger, unscaled one.
_RELATIVE_TO_BASE = 2e-7
# Radians per token. longrope's factor of 1e30 leaves about 1e-33 for pairs that should not rotate.
NO_ROTATION = 1e-25
# Absolute difference of a cos or sin at a small position, and per token of the position: float32 rounds the angle.
_SAME_ANGLE = 1e-5
_ANGLE_PER_TOKEN = 2.0**-22


def prove(plan: PatchPlan) -> int:
    """Compare every rotary table of the config.json that a patch writes with its ropes. Returns the number of tables.

    Tables that may depend on the length are compared at length 1, at the pretraining length, one token beyond it, and
    at the target length. The reading of the original config.json is proved first (see require_reading); with mrope,
    every dimension must still rotate by the same axis as there. Raises ProofError with the name of the module and the
    difference.
    """
    before = require_reading(plan.original)
    tables = rotary_tables(build_without_weights(stock_config_of(plan.config, plan.source.name)))
    for number, table in enumerate(tables):
        compare(table, plan.positions.ropes, before[number] if before else table)
    return len(tables)


def require_reading(config: dict[str, Any], model: "PreTrainedModel | None" = None) -> list[RotaryTable] | None:
    """Like prove_reading, but warns if nothing is proved. Returns the tables, or None."""
    tables, why_not = prove_reading(config, model)
    if tables is None:
        warn(f"not proved: that ropecli reads the original config.json as transformers does. {why_not}")
    return tables


def prove_reading(
    config: dict[str, Any], model: "PreTrainedModel | None" = None
) -> tuple[list[RotaryTable] | None, str]:
    """Compare every rotary table that stock transformers builds from config.json with those that ropecli reads from it.

    Left out is what transformers ignores by mistake, and a warning of read_settings names, and a head_dim of null, with
    which it fails; a patch repairs both. model: loaded from this config.json and not patched. Returns the tables; None,
    and why, if transformers cannot build or run the model or the scaling in config.json is invalid, so that nothing is
    proved. Raises ProofError with both values.
    """
    try:
        settings, config = read_settings(config, stock=True), copy.deepcopy(config)
        write_head_dim(section_of(config), settings.family)
        ropes = settings.scaled()
        tables = rotary_tables(build_without_weights(stock_config_of(config)) if model is None else model)
        for table in tables:
            compare(table, ropes, table)
    except ProofError as error:
        raise ProofError(
            f"ropecli does not read this config.json as transformers does, so a patch would start from a wrong base. "
            f"{error} Correct the RoPE fields of config.json. If they are right, ropecli does not support them yet."
        ) from error
    except (CheckpointError, MethodError, PatchError) as error:
        return None, str(error)
    return tables, ""


def compare(
    table: RotaryTable,
    ropes: Mapping[str | None, ScaledRope],
    unpatched: RotaryTable,
    sides: tuple[str, str] = ("in stock transformers", "in ropecli"),
) -> None:
    """Compare a table, and the cos and sin that its module computes, with the rope of its layer type.

    unpatched: the same table before a patch. sides: words for `table` and `ropes` in messages. Raises ProofError, and
    PatchError if the module cannot compute. The module keeps the table of the longest length.
    """
    rope = table.rope_in(ropes)
    varies = varies_with_length(rope)
    if varies or table.rope_type in FOLLOWS_LENGTH:
        pretrained = rope.geometry.original_max_position_embeddings
        for length in sorted({1, pretrained, min(pretrained + 1, rope.scaled_length), rope.scaled_length}):
            expected = scale(rope.geometry, rope.spec, length) if varies else rope
            _compare_table(f"{table.name} at length {length}", *table.at_length(length), expected, sides)
    else:
        _compare_table(table.name, table.inv_freq, table.attention_factor, rope, sides)
    if table.axes > 1:
        _compare_axes(table, unpatched, rope, sides)
    else:
        position = rope.scaled_length - 1
        _compare_angles(table, [position], np.array(position), rope, sides)


def _compare_axes(table: RotaryTable, unpatched: RotaryTable, rope: ScaledRope, sides: tuple[str, str]) -> None:
    """Compare the cos and sin of a token whose positions on the axes differ, as in an image (mrope)."""
    axes, before = _axes(table), _axes(unpatched)
    if not np.array_equal(axes, before):
        raise ProofError(
            f"{table.name}: the dimensions rotate by the axes {axes.tolist()} in the live module, but by "
            f"{before.tolist()} before the patch. Check mrope_section in config.json."
        )
    positions = np.arange(2, 2 + table.axes)
    _compare_angles(table, positions.tolist(), positions[axes], rope, sides)


def _compare_angles(
    table: RotaryTable, positions: list[int], by_dimension: np.ndarray, rope: ScaledRope, sides: tuple[str, str]
) -> None:
    """Compare the cos and sin of a token. positions: one per axis. by_dimension: that of each dimension, or of all."""
    if varies_with_length(rope):
        rope = scale(rope.geometry, rope.spec, max(positions) + 1)
    cos_sin, factor = table.angles_at(*positions), rope.attention_factor
    allowed = factor * (_SAME_ANGLE + _ANGLE_PER_TOKEN * max(positions))
    for pairs in (np.tile(rope.inv_freq, 2), np.repeat(rope.inv_freq, 2), rope.inv_freq):  # layouts of transformers
        if cos_sin.shape[1] == pairs.size:
            angles = by_dimension * pairs
            if np.allclose(cos_sin, factor * np.stack([np.cos(angles), np.sin(angles)]), rtol=0, atol=allowed):
                return
    raise ProofError(
        f"{table.name}: the cos and sin of a token at {', '.join(map(str, positions))} {sides[0]} differ from those "
        f"{sides[1]}."
    )


def _axes(table: RotaryTable) -> np.ndarray:
    """The axis whose position rotates each dimension. Shape (rotary_dim,)."""
    alone = np.eye(table.axes, dtype=int)
    return np.abs([table.angles_at(*row.tolist())[1] for row in alone]).argmax(axis=0)


def _compare_table(
    name: str, inv_freq: np.ndarray, attention_factor: float, rope: ScaledRope, sides: tuple[str, str]
) -> None:
    here, there = sides
    if inv_freq.shape != rope.inv_freq.shape:
        raise ProofError(f"{name}: {inv_freq.size} pairs rotate {here}, but {rope.inv_freq.size} {there}.")
    error = np.abs(inv_freq - rope.inv_freq)
    allowed = _RELATIVE * rope.inv_freq + _RELATIVE_TO_BASE * rope.geometry.inv_freq() + NO_ROTATION
    if (error > allowed).any():
        pair = int((error / allowed).argmax())
        relative = error[pair] / max(rope.inv_freq[pair], np.finfo(np.float32).tiny)
        raise ProofError(
            f"{name}: pair {pair} rotates by {inv_freq[pair]:.6g} radians per token {here}, but by "
            f"{rope.inv_freq[pair]:.6g} {there} (relative difference {relative:.2g})."
        )
    expected = rope.attention_factor
    if abs(attention_factor - expected) > _RELATIVE * expected:
        raise ProofError(f"{name}: the attention factor is {attention_factor:.6g} {here}, but {expected:.6g} {there}.")
