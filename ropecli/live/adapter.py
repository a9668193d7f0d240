"""Reads an adapter's folder, as peft or ropecli wrote it, and merges it into the model of its base."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ropecli.checkpoint.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, is_file, is_own_file, read_json
from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.provenance import read_record
from ropecli.errors import CheckpointError, reason_of, shown
from ropecli.live.stock_transformers import quiet_transformers

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

ADAPTER_NOTE = "adapter"
"""The key in ropecli.yaml for the digest of the base's weights."""
PREFIX = "base_model.model."
"""peft's prefix of every name in an adapter's weights."""
# Others start from parts of the base's own weights, which then are not the base that was trained beside.
_INDEPENDENT_STARTS = (True, False, "gaussian", "eva", "orthogonal")

Tensors = dict[str, torch.Tensor]


def read_adapter(folder: Path) -> tuple["LoraConfig", Tensors]:
    """Its config and tensors. Raises CheckpointError for a folder without an adapter, or with one that is not LoRA."""
    from peft import LoraConfig

    if not is_own_file(folder / ADAPTER_CONFIG) or not is_file(folder / ADAPTER_WEIGHTS):
        raise CheckpointError(
            f"{folder} is not an adapter's folder: it must hold {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}."
        )
    written = read_json(folder / ADAPTER_CONFIG)
    if written.get("peft_type") != "LORA":
        raise CheckpointError(f"{folder}: peft_type is {shown(written.get('peft_type'))}; only LORA can be merged.")
    unusual = {key: written[key] for key in ("megatron_config", "layer_replication") if written.get(key)}
    if (start := written.get("init_lora_weights", True)) not in _INDEPENDENT_STARTS:
        unusual["init_lora_weights"] = start
    if unusual:
        key, value = next(iter(unusual.items()))
        raise CheckpointError(f"{folder}: adapters with {key} {shown(value)} cannot be merged.")
    try:
        config = LoraConfig.from_pretrained(str(folder))
        return config, load_file(folder / ADAPTER_WEIGHTS)
    except (SafetensorError, OSError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{folder} holds no adapter that can be read: {reason_of(error)}") from error


def merge_adapter(
    checkpoint: Checkpoint, model: "PreTrainedModel", config: "LoraConfig", tensors: Tensors
) -> "PreTrainedModel":
    """`model`, of `checkpoint`, with the adapter added to its weights in their dtype.

    Raises CheckpointError where the adapter does not fit.
    """
    from peft import PeftModel, set_peft_model_state_dict

    lora = {name: tensor for name, tensor in tensors.items() if ".lora_" in name}
    _load_whole(checkpoint, model, {name: tensor for name, tensor in tensors.items() if name not in lora})
    alone = dataclasses.replace(
        config, modules_to_save=None, ensure_weight_tying=False, init_lora_weights=True, inference_mode=True
    )
    try:
        with quiet_transformers():
            wrapped = PeftModel(model, alone)
            found: Any = set_peft_model_state_dict(wrapped, lora)
            missing = [key for key in found.missing_keys if ".lora_" in key]
            if found.unexpected_keys or missing:
                raise _does_not_fit(checkpoint, f"{[*found.unexpected_keys, *missing][0]} has no counterpart")
            return wrapped.merge_and_unload(safe_merge=True)
    except (RuntimeError, ValueError, KeyError) as error:
        raise _does_not_fit(checkpoint, reason_of(error)) from error
    except (TypeError, AttributeError) as error:  # peft does not check the types of adapter_config.json
        raise CheckpointError(f"peft cannot use this {ADAPTER_CONFIG}: {reason_of(error)}. Check its types.") from error


def weights_digest(checkpoint: Checkpoint) -> str:
    """A digest of the weights alone, which a patch does not change."""
    return dataclasses.replace(checkpoint, config={}).digest()


def other_base(adapter: Path, base: Checkpoint) -> str | None:
    """A warning where the base's weights are not those that the adapter was trained with."""
    recorded = (read_record(adapter).get(ADAPTER_NOTE) or {}).get("weights")
    if not recorded or recorded == weights_digest(base):
        return None
    return f"The adapter {adapter} was trained with other weights than those of {base.name}."


def _load_whole(checkpoint: Checkpoint, model: "PreTrainedModel", whole: Tensors) -> None:
    """Embeddings and norms that were trained whole, in place, so that ties stay."""
    own = model.state_dict()
    for name, tensor in whole.items():
        target = own.get(name.removeprefix(PREFIX))
        if target is None or target.shape != tensor.shape:
            there = "has no such tensor" if target is None else f"has it as {tuple(target.shape)}"
            raise _does_not_fit(checkpoint, f"the base {there}: {name}, {tuple(tensor.shape)}")
        for tied in [other for other, value in own.items() if value.data_ptr() == target.data_ptr()]:
            other = whole.get(PREFIX + tied)
            if other is None or not torch.equal(other, tensor):
                raise _does_not_fit(checkpoint, f"it trains {name} apart from {tied}, and they are one in the base")
        with torch.no_grad():
            target.copy_(tensor)


def _does_not_fit(checkpoint: Checkpoint, why: str) -> CheckpointError:
    return CheckpointError(
        f"The adapter does not fit {checkpoint.name}: {why}. Name its base: ropecli merge --base CHECKPOINT."
    )
