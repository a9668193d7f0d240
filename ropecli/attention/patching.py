"""Patch a checkpoint or a live model, and prove a distance method.

The proof of a distance method has two parts: rotating queries and keys further must equal other positions
(head_layout.py), and a text too short for any distance to change must give the same output as without the method.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ropecli.attention.attention_function import frequencies_of
from ropecli.attention.head_layout import find_layout, in_evaluation
from ropecli.checkpoint.patch_plan import PatchPlan
from ropecli.checkpoint.writing import write_patch
from ropecli.config.saved_remapping import KEY, SavedRemapping
from ropecli.errors import PatchError, ProofError
from ropecli.live.devices import probe_ids
from ropecli.live.loading import is_quantized
from ropecli.live.proof import NO_ROTATION, prove
from ropecli.live.rotary import rotary_tables, rotate_by, unpatched_after
from ropecli.live.skeleton import make_small_model
from ropecli.live.stock_transformers import is_encoder, quiet_transformers, stock_config_of
from ropecli.scaling.spec import ScaledRope

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOKENS = 48
_SAME = 1e-4
_SAME_IN_HALF = 5e-2
"""Allowed difference between two ways to compute an output, relative to its largest number."""


def patch_to(plan: PatchPlan, output: Path, *, verify: bool = True) -> int:
    """Prove the plan and write the patched checkpoint. Returns the number of rotary tables compared.

    verify: false to skip the proof, which gives 0. Raises OutputError, ProofError: nothing is written.
    """
    plan = with_layout(plan)
    proved = prove(plan) if verify else 0
    write_patch(plan, output)
    return proved


def with_layout(plan: PatchPlan) -> PatchPlan:
    """Add the layout of the rotary dimensions to the plan of a distance method.

    The layout is found and proved on a small model of the architecture with random weights. Plans without such a
    method, or with a known layout, are returned unchanged. Raises PatchError if the architecture does not support the
    method, OutputError if no temporary file can be written.
    """
    saved = plan.remapping
    if saved is None or saved.rotary_start is not None:
        return plan
    return replace(plan, remapping=_prove_on_small_model(stock_config_of(plan.config), saved))


def live_patch(model: "PreTrainedModel", ropes: Mapping[str | None, ScaledRope]) -> None:
    """Patch a model in memory with the ropes of a plan (plan.ropes), replacing any earlier patch.

    Methods that depend on the length use the largest position of each forward pass, independent of earlier passes. Keys
    in a KV cache keep their rotation. Distance methods are proved on this model. `unpatched_after` removes the patch.
    Raises PatchError for layer types without a rope, for a model that does not rotate by its tables, for DeepSeek's
    mscale_all_dim, which is not in the tables, and for an attention that the distance method does not support. The
    model is then unchanged.
    """
    saved = SavedRemapping.of(ropes.values())
    with unpatched_after(model) as undo:
        config = model.config.get_text_config()
        if getattr(config, KEY, None) is not None:  # of an earlier patch
            delattr(config, KEY)
            _set_attention(model, "sdpa" if model._supports_sdpa else "eager")
        rotate_by(model, ropes)
        if saved is not None:
            _set_remapping(model, saved, ropes)
        undo.pop_all()  # nothing failed, so the patch stays


def _set_remapping(
    model: "PreTrainedModel", saved: SavedRemapping, ropes: Mapping[str | None, ScaledRope]
) -> SavedRemapping:
    """Set the attention of a distance method in memory. Returns `saved` with the layout of this model.

    ropes: the ropes of the model's tables, by layer type; empty if the config's RoPE fields define them. Raises
    PatchError if the architecture does not support the method.
    """
    layout = find_layout(model)
    _set_attention(model, "eager")  # transformers 5.20's sdpa ignores soft caps
    before = _output(model, saved)
    inv_freq = {label or "": rope.inv_freq.tolist() for label, rope in ropes.items()}
    complete = replace(saved, **layout._asdict(), inv_freq=inv_freq)
    config = model.config.get_text_config()
    setattr(config, KEY, complete.without_score_factors().as_json())
    _set_attention(model, saved.attention)
    exact = model.dtype in (torch.float32, torch.float64) and not is_quantized(model)
    error = ((before - _output(model, saved)).abs().max() / before.abs().max().clamp_min(1e-6)).item()
    if not error <= (_SAME if exact else _SAME_IN_HALF):
        raise PatchError(
            f"On a text too short for {saved.method} to change any distance, the output changes by {error:.2g} of its "
            "largest value: the model's attention has a feature that is not supported."
        )
    setattr(config, KEY, complete.as_json())
    return complete


def _set_attention(model: "PreTrainedModel", name: str) -> None:
    with quiet_transformers():
        model.set_attn_implementation(name if model.config.get_text_config() is model.config else {"text_config": name})


def _prove_on_small_model(config: Any, saved: SavedRemapping) -> SavedRemapping:
    """Prove the method on a small model of the architecture. Returns `saved` with the layout.

    config: as read by stock transformers. Raises ProofError, PatchError, CheckpointError.
    """
    if config.get_text_config()._attn_implementation != saved.attention:
        raise ProofError("Stock transformers ignores the attention set in config.json.")
    if is_encoder(config):
        raise PatchError(f"{saved.method} needs a model that sees only earlier tokens; this is an encoder.")
    model, _ = make_small_model(config)
    if config.get_text_config() is not config and any(table.axes > 1 for table in rotary_tables(model)):
        raise PatchError(
            f"{saved.method} needs one position per token, but {config.model_type} gives the tokens of an image three "
            "(mrope). Use a frequency method, such as yarn."
        )
    by_layer_type = frequencies_of(model.config.get_text_config())  # those that the attention reads
    for table in rotary_tables(model):
        inv_freq = by_layer_type.get(table.layer_type or "", [])
        if len(inv_freq) != table.inv_freq.size or not np.allclose(
            inv_freq, table.inv_freq, rtol=_SAME, atol=NO_ROTATION
        ):
            raise ProofError(f"{table.name}: its frequencies differ from those of the config's RoPE fields.")
    return _set_remapping(model, saved, ropes={})


@torch.no_grad()
def _output(model: "PreTrainedModel", saved: SavedRemapping) -> torch.Tensor:
    """The model's output (logits, if it has a head) for a text too short for the method to change any distance."""
    at = np.arange(_TOKENS)
    distances, standard = saved.remapping().distances(at, at), at[:, None] - at[None]
    changed = ((distances != standard) & (standard >= 0)).any(axis=1)
    length = int(changed.argmax()) if changed.any() else _TOKENS
    with in_evaluation(model):
        return model(input_ids=probe_ids(model, length), use_cache=False)[0]
