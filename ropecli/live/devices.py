"""The devices of a loaded model, and ids to run it on."""

from typing import TYPE_CHECKING, Any

import psutil
import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def input_device(model: "PreTrainedModel") -> torch.device:
    """The device on which the embedding runs."""
    embedding: Any = model.get_input_embeddings()
    if not embedding.weight.is_meta:
        return embedding.weight.device
    # offloaded: Accelerate moves the weights to the first GPU, if any, to run the module
    gpus = [name for name in _mapped_devices(model) if name not in ("cpu", "disk")]
    return torch.device(gpus[0] if gpus else "cpu")


def probe_ids(model: "PreTrainedModel", tokens: int) -> torch.Tensor:
    """Ids of a text to run the model on, shape (1, tokens), where its embedding runs."""
    embedding: Any = model.get_input_embeddings()
    return (torch.arange(tokens, device=input_device(model))[None] * 7 + 3) % embedding.weight.shape[0]


def device_names(model: "PreTrainedModel") -> str:
    """The devices of the weights, separated by commas, such as cuda:0,cuda:1,cpu,disk."""
    return ",".join(_mapped_devices(model)) or str(model.device)


def _mapped_devices(model: "PreTrainedModel") -> list[str]:
    """The names of the devices in the model's device_map, without repetition; empty if it was loaded without one."""
    devices = getattr(model, "hf_device_map", {}).values()  # 0 is cuda:0; disk is no torch.device
    return list(dict.fromkeys("disk" if device == "disk" else str(torch.device(device)) for device in devices))


def computes_bfloat16() -> bool:
    """Return whether this CPU is known to have bfloat16 arithmetic."""
    return any(_capabilities().get(unit) for unit in ("avx512_bf16", "amx_bf16"))


def emulates_bfloat16() -> bool:
    """Return whether this CPU is known to lack bfloat16 arithmetic. torch then takes some 50 times as long."""
    return _capabilities().get("architecture") == "x86_64" and not computes_bfloat16()


def _capabilities() -> dict[str, Any]:
    return getattr(torch.cpu, "get_capabilities", dict)()


def total_memory(device: torch.device) -> int:
    """Bytes of the GPU, or of this machine's main memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total)
