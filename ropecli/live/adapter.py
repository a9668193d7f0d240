"""Read a LoRA adapter written by peft or ropecli and merge it into its base model."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ropecli.checkpoint.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, is_own_file, read_json, read_record
from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.provenance import entry
from ropecli.errors import CheckpointError, NotFiniteError, reason_of, shown
from ropecli.live.stock_transformers import quiet_transformers
from ropecli.live.tensors import ties_head

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

ADAPTER_NOTE = "adapter"
"""The key in ropecli.yaml for the digest of the base's weights."""
PREFIX = "base_model.model."
"""peft's prefix of every name in an adapter's weights."""
_SAVED, _ORIGINAL, _BASE = ".modules_to_save.", ".original_module.", ".base_layer."
"""Parts of the names in peft's wrappers, which it writes for embeddings and heads: trained, before training, frozen."""
# Other initializations (PiSSA, OLoRA, ...) change the base weights before training.
_INDEPENDENT_STARTS = (True, False, "gaussian", "eva", "orthogonal")

Tensors = dict[str, torch.Tensor]


def read_adapter(folder: Path) -> tuple["LoraConfig", Tensors]:
    """Read the adapter's config and tensors. Raises CheckpointError if there is no LoRA adapter in the folder."""
    from peft import LoraConfig

    if not is_own_file(folder / ADAPTER_CONFIG):
        raise CheckpointError(
            f"{folder} has no {ADAPTER_CONFIG}, so there is no adapter to merge. A whole checkpoint, as `finetune` "
            "writes by default, is merged already."
        )
    written = read_json(folder / ADAPTER_CONFIG)
    unsupported = {key: written[key] for key in ("megatron_config", "layer_replication") if written.get(key)}
    if (start := written.get("init_lora_weights", True)) not in _INDEPENDENT_STARTS:
        unsupported["init_lora_weights"] = start
    if (kind := written.get("peft_type")) != "LORA":
        unsupported["peft_type"] = kind
    if unsupported:
        key, value = next(iter(unsupported.items()))
        raise CheckpointError(f"{folder}: {key} {shown(value)} is not supported for merging.")
    try:
        config = LoraConfig.from_pretrained(str(folder))
        return config, load_file(folder / ADAPTER_WEIGHTS)
    except (SafetensorError, OSError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"Cannot read the adapter in {folder}: {reason_of(error)}") from error


def merge_adapter(
    checkpoint: Checkpoint, model: "PreTrainedModel", config: "LoraConfig", tensors: Tensors
) -> "PreTrainedModel":
    """Merge the adapter into the weights of `model`, in their dtype. checkpoint: the base, for messages.

    Raises CheckpointError if the adapter does not fit the model, NotFiniteError if a product with it is not finite.
    """
    from peft import PeftModel, set_peft_model_state_dict

    # peft merges these itself; trainable_tokens are the changes of single embeddings
    lora = {name: tensor for name, tensor in tensors.items() if ".lora_" in name or ".trainable_tokens_" in name}
    in_full = {name: tensor for name, tensor in tensors.items() if name not in lora}
    untied = _load_trained_in_full(checkpoint, model, in_full, {name.partition(".lora_")[0] for name in lora})
    if untied and config.ensure_weight_tying:
        raise CheckpointError(
            f"{checkpoint.name}: a LoRA of tied embeddings with ensure_weight_tying is not supported for merging."
        )
    lora_config = dataclasses.replace(
        config, modules_to_save=None, ensure_weight_tying=False, init_lora_weights=True, inference_mode=True
    )
    try:
        with quiet_transformers():
            wrapped = PeftModel(model, lora_config)
            result: Any = set_peft_model_state_dict(wrapped, lora)
            unmatched = [*result.unexpected_keys, *(key for key in result.missing_keys if ".lora_" in key)]
            if unmatched:
                raise _does_not_fit(checkpoint, f"{unmatched[0]} has no matching tensor")
            return wrapped.merge_and_unload(safe_merge=True)
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        if "NaNs detected in the merged weights" in str(error):
            raise NotFiniteError(
                f"{checkpoint.name} with the adapter has weights that are not finite. Train again with a lower "
                "--learning-rate or more warmup_steps."
            ) from error
        raise _does_not_fit(checkpoint, reason_of(error), f"Check {ADAPTER_CONFIG}.") from error


def only_weights(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint whose digest is of the weights alone; patching config.json does not change it."""
    return dataclasses.replace(checkpoint, config={})


def other_base(adapter: Path, base: Checkpoint) -> str | None:
    """Return a warning if the adapter was trained with other base weights."""
    recorded = entry(read_record(adapter), ADAPTER_NOTE).get("weights")
    if not recorded or recorded == only_weights(base).digest():
        return None
    return f"The adapter {adapter} was trained on different weights than those of {base.name}."


def _load_trained_in_full(
    checkpoint: Checkpoint, model: "PreTrainedModel", tensors: Tensors, adapted: set[str]
) -> bool:
    """Copy fully trained embeddings and norms, and embeddings of another size, into the model, in place.

    adapted: modules with a product of LoRA, by peft's names. As in peft, the vocabulary may have been resized. A head
    that was tied is untied unless it was trained as the embeddings, since peft would add a product to both. Returns
    whether one with a product was untied.
    """
    trained = {}
    for name in sorted(tensors, key=lambda name: _SAVED in name):  # over the same without it
        if _ORIGINAL not in name:
            trained[name.removeprefix(PREFIX).replace(_SAVED, ".").replace(_BASE, ".")] = tensors[name]
    embeddings: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    names = {module: f"{name}.weight" for name, module in model.named_modules() if module in (embeddings, head)}
    rows = {len(trained[name]) for name in names.values() if name in trained}
    if len(rows) == 1 and rows != {embeddings.num_embeddings}:
        model.resize_token_embeddings(min(rows), mean_resizing=False)
        embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_adapted = False
    if ties_head(model):
        pair = [trained[name] for name in names.values() if name in trained]
        is_adapted = any(PREFIX + name.removesuffix(".weight") in adapted for name in names.values())
        if is_adapted or len(pair) == 1 or (pair and not torch.equal(*pair)):
            head.weight = torch.nn.Parameter(head.weight.detach().clone())
            model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = False
    of_model = model.state_dict()
    for name, tensor in trained.items():
        target = of_model.get(name)
        if target is None or target.shape != tensor.shape:
            base = "is missing in the base" if target is None else f"has shape {tuple(target.shape)} in the base"
            raise _does_not_fit(checkpoint, f"{name}, shape {tuple(tensor.shape)}, {base}")
        with torch.no_grad():
            target.copy_(tensor)
    return is_adapted


def _does_not_fit(checkpoint: Checkpoint, why: str, advice: str = "") -> CheckpointError:
    advice = advice or f"Check {ADAPTER_CONFIG}, or set its base: ropecli merge --base CHECKPOINT."
    return CheckpointError(f"The adapter does not fit {checkpoint.name}: {why}. {advice}")
