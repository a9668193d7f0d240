"""Patches a checkpoint or a live model, with the proof of a distance method.

The proof of a distance method: rotating queries and keys further does what other positions in the model do
(head_layout.py); and a short text, on which every method is plain attention, gives what the model gives without it.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ropecli.attention.attention_function import frequencies_of
from ropecli.attention.attention_probe import in_evaluation
from ropecli.attention.head_layout import find_layout
from ropecli.attention.small_model import make_small_model
from ropecli.checkpoint.patch_plan import PatchPlan
from ropecli.checkpoint.writing import write_patch
from ropecli.config.changes import diff
from ropecli.config.saved_remapping import KEY, SavedRemapping, read_saved_remapping, write_saved_remapping
from ropecli.errors import PatchError, ProofError
from ropecli.live.proof import prove
from ropecli.live.rotary import rotary_tables, turn_by, unpatched_after
from ropecli.live.stock_transformers import quiet_transformers, stock_config_of
from ropecli.scaling.spec import ScaledRope

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOKENS = 48
_SAME = 1e-4
_SAME_IN_HALF = 5e-2
"""Allowed difference between two ways to compute an output, relative to its largest number."""
_STILL = 1e-25
"""Radians per token: less rotates nothing."""


def patch_to(plan: PatchPlan, output: Path, *, verify: bool = True, **options: Any) -> int:
    """Writes the patched checkpoint; returns how many live rotary tables proved it (0 without `verify`).

    options: of write_patch. Raises OutputError, ProofError; then nothing is left behind.
    """
    return write_patch(with_layout(plan), output, prove=prove if verify else None, **options)


def with_layout(plan: PatchPlan) -> PatchPlan:
    """The plan with what a distance method must know of the model: which dimensions of a head rotate.

    It is found on a small model of the architecture with random weights, and proved there. A plan without such a
    method, or one that knows it already, is given back as it is. Raises PatchError where the architecture does not
    allow the method, OutputError where nothing temporary can be written.
    """
    saved = read_saved_remapping(plan.config)
    if saved is None or saved.rotary_start is not None:
        return plan
    settled = _prove_on_small_model(stock_config_of(plan.config), saved)
    config = copy.deepcopy(plan.config)
    write_saved_remapping(config, settled)
    return replace(plan, config=config, changes=tuple(diff(plan.source.config, config)))


def live_patch(model: "PreTrainedModel", ropes: Mapping[str | None, ScaledRope]) -> None:
    """Patches a model in memory, by the ropes of a plan (plan.ropes), in place of any patch that it has.

    Methods that depend on the length follow it: every forward pass rotates by its own largest position, whatever
    passes came before. Keys that lie in a KV cache keep the rotation they got. Distance methods are proved on
    the spot. `unpatched_after` takes it back. Raises PatchError for layer types without a rope, for a model that does
    not rotate by its tables, for DeepSeek's mscale_all_dim, which is not in the tables, and for an attention that a
    distance method would not do right; the model is then as it was.
    """
    saved = SavedRemapping.of(ropes.values())
    with unpatched_after(model) as undo:
        _remove_remapping(model)
        turn_by(model, ropes)
        if saved is not None:
            _set_remapping(model, saved, ropes)
        undo.pop_all()  # nothing failed, so the patch stays


def _set_remapping(
    model: "PreTrainedModel", saved: SavedRemapping, ropes: Mapping[str | None, ScaledRope]
) -> SavedRemapping:
    """Makes a model attend as `saved` says, in memory; returns it with the layout that was found.

    ropes: the ropes of the model's tables, by layer type; empty where its config's RoPE fields give them. Raises
    PatchError where its architecture does not allow the method.
    """
    layout = find_layout(model)
    _set_attention(model, "eager")  # which leaves nothing out; transformers 5.20's sdpa knows no soft caps
    before = _output(model, saved)
    inv_freq = {label or "": rope.inv_freq.tolist() for label, rope in ropes.items()}
    complete = replace(saved, **layout._asdict(), inv_freq=inv_freq)
    setattr(model.config.get_text_config(), KEY, complete.as_json())
    _set_attention(model, saved.attention)
    _compare(before, _output(model, saved), saved)
    return complete


def _remove_remapping(model: "PreTrainedModel") -> None:
    """Takes a distance method away from a model; nothing where it has none."""
    config = model.config.get_text_config()
    if getattr(config, KEY, None) is not None:
        delattr(config, KEY)
        _set_attention(model, "sdpa" if model._supports_sdpa else "eager")


def _set_attention(model: "PreTrainedModel", name: str) -> None:
    with quiet_transformers():
        model.set_attn_implementation(name if model.config.get_text_config() is model.config else {"text_config": name})


def _prove_on_small_model(config: Any, saved: SavedRemapping) -> SavedRemapping:
    """Has a small model of the architecture attend as `config` asks for, which stock transformers has read.

    Returns it with the layout that was found. Raises ProofError, PatchError, CheckpointError.
    """
    if config.get_text_config()._attn_implementation != saved.attention:
        raise ProofError("Stock transformers does not take the attention that config.json asks for.")
    model = make_small_model(config)
    _check_frequencies(model)
    return _set_remapping(model, saved, ropes={})


def _check_frequencies(model: "PreTrainedModel") -> None:
    """Raises ProofError unless the frequencies that the attention reads from the config are those of the model."""
    known = frequencies_of(model.config.get_text_config())
    for table in rotary_tables(model):
        own = known.get(table.layer_type or "", [])
        if len(own) != table.inv_freq.size or not np.allclose(own, table.inv_freq, rtol=_SAME, atol=_STILL):
            raise ProofError(f"{table.name} rotates by other frequencies than its config's RoPE fields say.")


@torch.no_grad()
def _output(model: "PreTrainedModel", saved: SavedRemapping) -> torch.Tensor:
    """The model's output (logits, if it has a head) for a text so short that the method changes no distance."""
    embeddings: Any = model.get_input_embeddings()
    ids = torch.arange(_unchanged_length(saved), device=model.device)[None] * 7 % embeddings.weight.shape[0]
    with in_evaluation(model):
        return model(input_ids=ids, use_cache=False)[0]


def _unchanged_length(saved: SavedRemapping) -> int:
    """Tokens up to which the method is plain attention, at most _TOKENS."""
    at = np.arange(_TOKENS)
    distances = saved.remapping().distances(at, at)
    plain = at[:, None] - at[None]
    differs = ((distances != plain) & (plain >= 0)).any(axis=1)
    return int(differs.argmax()) if differs.any() else _TOKENS


def _compare(expected: torch.Tensor, found: torch.Tensor, saved: SavedRemapping) -> None:
    allowed = _SAME if expected.dtype in (torch.float32, torch.float64) else _SAME_IN_HALF
    error = ((expected - found).abs().max() / expected.abs().max().clamp_min(1e-6)).item()
    if not error <= allowed:
        raise PatchError(
            f"Where {saved.method} changes nothing, the model's output differs by {error:.2g} of the largest from "
            "what it is without it: its attention does something that is not known here."
        )
