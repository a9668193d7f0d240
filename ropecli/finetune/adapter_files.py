"""An adapter apart from its base: its tensors, the two files that peft reads, and a base with the adapter merged in.

The folder of an adapter holds the patched config.json too, so that the base as it was published and this folder
together are the extended model.
"""

import copy
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ropecli.checkpoint.files import is_file, is_own_file, read_json
from ropecli.checkpoint.provenance import read_record
from ropecli.checkpoint.quiet import quiet_transformers
from ropecli.checkpoint.reading import HUB_ID, Checkpoint, open_checkpoint
from ropecli.errors import CheckpointError, RopecliError, reason_of, shown
from ropecli.evaluate.loading import load_model
from ropecli.finetune.adapters import ADAPTER, all_names, config_of

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_NOTE = "adapter"
"""In ropecli.yaml: what tells the base's weights from others."""
_PREFIX = "base_model.model."  # peft's, of every name in its files
# Others start from parts of the base's own weights, which then are not the base that was trained beside.
_INDEPENDENT_STARTS = (True, False, "gaussian", "eva", "orthogonal")

Tensors = dict[str, torch.Tensor]


def adapter_tensors(model: "PreTrainedModel", state: Tensors | None = None) -> Tensors:
    """What was trained, by peft's names, on the CPU.

    state: full tensors by the model's own names, where the model itself holds shards. A tied one stands there under
    each of its names: peft does not know of all ties, and would leave the head as it was.
    """
    from peft import get_peft_model_state_dict

    full: Tensors = {}
    for parameter, names in all_names(model):
        if parameter.requires_grad:
            value = parameter if state is None else next(state[name] for name in names if name in state)
            full |= {name: value.detach().cpu().clone() for name in names}
    lora = get_peft_model_state_dict(model, full, ADAPTER, save_embedding_layers=False)
    whole = {name: tensor for name, tensor in full.items() if f".{ADAPTER}." not in name}
    return {_PREFIX + name: tensor.contiguous() for name, tensor in {**lora, **whole}.items()}


def save_adapter(checkpoint: Checkpoint, model: "PreTrainedModel", folder: Path, state: Tensors | None = None) -> None:
    """Writes the adapter of `model`, which was trained beside the weights of `checkpoint`. Raises OSError."""
    config = copy.copy(config_of(model))
    config.target_modules = sorted(config.target_modules)  # a set's order differs from run to run
    config.base_model_name_or_path, config.revision = _base_of(checkpoint)
    config.inference_mode = True
    save_file(adapter_tensors(model, state), folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    config.save_pretrained(folder)


def read_adapter(folder: Path) -> tuple["LoraConfig", Tensors]:
    """A folder's adapter as peft or ropecli wrote it. Raises CheckpointError for what is none, or not LoRA's."""
    from peft import LoraConfig

    if not is_own_file(folder / ADAPTER_CONFIG) or not is_file(folder / ADAPTER_WEIGHTS):
        raise CheckpointError(f"{folder} is no adapter's folder: it must hold {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}.")
    written = read_json(folder / ADAPTER_CONFIG)
    if written.get("peft_type") != "LORA":
        raise CheckpointError(f"{folder}: peft_type is {written.get('peft_type')!r}; LORA alone is merged.")
    unusual = {key: written[key] for key in ("megatron_config", "layer_replication") if written.get(key)}
    if (start := written.get("init_lora_weights", True)) not in _INDEPENDENT_STARTS:
        unusual["init_lora_weights"] = start
    if unusual:
        key, value = next(iter(unusual.items()))
        raise CheckpointError(f"{folder}: adapters with {key} {shown(value)} are not merged here.")
    try:
        config = LoraConfig.from_pretrained(str(folder))
        return config, load_file(folder / ADAPTER_WEIGHTS)
    except (SafetensorError, OSError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder} holds no adapter that can be read: {reason_of(error)}") from error


def merged(checkpoint: Checkpoint, config: "LoraConfig", tensors: Tensors) -> "PreTrainedModel":
    """The model of `checkpoint` with the adapter added into its weights, float32, on the CPU.

    Always onto the weights of the file: a base in 4 bits, or in bfloat16, would leave its rounding behind. Raises
    CheckpointError where the adapter does not fit.
    """
    from peft import PeftModel, set_peft_model_state_dict

    model = load_model(checkpoint, dtype="float32", device="cpu")
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


def adapter_base(config: "LoraConfig") -> tuple[str | None, str | None]:
    """(name, revision) of the base that the adapter's config names."""
    return config.base_model_name_or_path, config.revision


def weights_digest(checkpoint: Checkpoint) -> str:
    """As Checkpoint.digest, of the weights alone: a patch leaves it as it was."""
    return dataclasses.replace(checkpoint, config={}).digest()


def _load_whole(checkpoint: Checkpoint, model: "PreTrainedModel", whole: Tensors) -> None:
    """Embeddings and norms that were trained whole, in place, so that ties stay."""
    own = model.state_dict()
    for name, tensor in whole.items():
        target = own.get(name.removeprefix(_PREFIX))
        if target is None or target.shape != tensor.shape:
            there = "has no such tensor" if target is None else f"has it as {tuple(target.shape)}"
            raise _does_not_fit(checkpoint, f"the base {there}: {name}, {tuple(tensor.shape)}")
        for twin in [other for other, value in own.items() if value.data_ptr() == target.data_ptr()]:
            other = whole.get(_PREFIX + twin)
            if other is None or not torch.equal(other, tensor):
                raise _does_not_fit(checkpoint, f"it trains {name} apart from {twin}, and they are one in the base")
        with torch.no_grad():
            target.copy_(tensor)


def _does_not_fit(checkpoint: Checkpoint, why: str) -> CheckpointError:
    return CheckpointError(f"The adapter does not fit {checkpoint.name}: {why}. Name its base: --base CHECKPOINT.")


def _base_of(checkpoint: Checkpoint) -> tuple[str, str | None]:
    """(name, commit) of a checkpoint with these weights: what was patched, where it can still be found."""
    record: dict[str, Any] = read_record(checkpoint.folder)
    source = record.get("source")
    if isinstance(source, dict) and "finetuned" not in record:
        name = str(source.get("checkpoint"))
        if HUB_ID.fullmatch(name) and "commit" in source:
            return name, source["commit"]
        try:
            found = open_checkpoint(name)
        except RopecliError:  # a name that meant something elsewhere
            found = None
        if found and weights_digest(found) == weights_digest(checkpoint):
            return str(found.folder.resolve()), None
    if checkpoint.commit:
        return checkpoint.name, checkpoint.commit
    return str(checkpoint.folder.resolve()), None
