"""The two files of an adapter that peft reads: its tensors and adapter_config.json.

The folder holds the patched config.json too. It names the checkpoint that was trained as its base, patched as that is:
peft loads the base by that name, with the base's own config.json.
"""

import copy
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import save_file

from ropecli.checkpoint.files import ADAPTER_WEIGHTS
from ropecli.checkpoint.opening import Checkpoint
from ropecli.live.adapter import PREFIX, Tensors
from ropecli.training.adapters import ADAPTER, all_names, config_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
    return {PREFIX + name: tensor.contiguous() for name, tensor in {**lora, **whole}.items()}


def save_adapter(checkpoint: Checkpoint, model: "PreTrainedModel", folder: Path, state: Tensors | None = None) -> None:
    """Writes the adapter of `model`, which was trained beside the weights of `checkpoint`. Raises OSError."""
    config = copy.copy(config_of(model))
    config.target_modules = sorted(config.target_modules)  # a set's order differs from run to run
    if checkpoint.commit:
        config.base_model_name_or_path, config.revision = checkpoint.name, checkpoint.commit
    else:
        config.base_model_name_or_path, config.revision = str(checkpoint.folder.resolve()), None
    config.inference_mode = True
    save_file(adapter_tensors(model, state), folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    config.save_pretrained(folder)
