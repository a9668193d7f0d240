"""The devices of a loaded model, and its peak memory."""

import contextlib
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def input_device(model: "PreTrainedModel") -> torch.device:
    """The device on which the embedding runs. Accelerate runs offloaded modules on the first GPU, if any."""
    embedding: Any = model.get_input_embeddings()
    if not embedding.weight.is_meta:
        return embedding.weight.device
    gpus = [place for place in _places(model) if place not in ("cpu", "disk")]
    return torch.device(gpus[0] if gpus else "cpu")


def device_names(model: "PreTrainedModel") -> str:
    """The devices of the weights, separated by commas, such as cuda:0,cuda:1,cpu,disk."""
    return ",".join(_places(model)) or str(model.device)


def _places(model: "PreTrainedModel") -> list[str]:
    """The devices of a model spread by a device_map; empty if it was loaded without one."""
    places = getattr(model, "hf_device_map", {}).values()
    return list(dict.fromkeys("disk" if place == "disk" else str(torch.device(place)) for place in places))


def total_memory(device: torch.device) -> int:
    """Bytes of the GPU, or of this machine's main memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total)


def reset_peak(device: torch.device) -> None:
    """Reset the peak. Without effect on CPUs outside Linux, where the peak of a process only grows."""
    if device.type == "cuda":
        for number in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(number)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> int:
    """Peak since `reset_peak`, bytes; 0 if the system does not report it.

    On a GPU, what this process allocated on all GPUs; otherwise the resident set of the process.
    """
    if device.type == "cuda":
        return sum(int(torch.cuda.max_memory_allocated(number)) for number in range(torch.cuda.device_count()))
    with contextlib.suppress(OSError):
        if peak := re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8")):
            return int(peak[1]) * 1024
    with contextlib.suppress(ImportError):  # Windows
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return 0
