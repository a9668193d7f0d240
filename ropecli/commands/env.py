"""`ropecli env`: what a bug report needs."""

import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ropecli.errors import quoted
from ropecli.signature import command

_PACKAGES = (
    *("ropecli", "torch", "transformers", "tokenizers", "accelerate", "peft", "datasets", "huggingface_hub", "numpy"),
    *("safetensors", "typer", "rich", "vllm", "sglang", "bitsandbytes", "flash-attn", "trl"),
)
_VARIABLES = ("ROPECLI_CACHE", "HF_HOME", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class Environment:
    """values: by name, such as python, torch or device."""

    values: dict[str, str]

    def as_json(self) -> Any:
        return self.values


@command
def env() -> Environment:
    """Print versions, devices and settings, for a bug report."""
    values = {"python": platform.python_version(), "system": platform.platform()}
    for name in _PACKAGES:
        try:
            values[name] = version(name)
        except PackageNotFoundError:
            continue
    import psutil
    import torch

    from ropecli.data.token_store import cache_folder
    from ropecli.live.devices import emulates_bfloat16, total_memory
    from ropecli.messages import size

    memory = size(total_memory(torch.device("cpu")))
    arithmetic = "without" if emulates_bfloat16() else "with"
    values["cpu"] = f"{psutil.cpu_count(logical=False)} cores, {memory}, {arithmetic} bfloat16 arithmetic"
    for number in range(torch.cuda.device_count()):
        device = torch.device("cuda", number)
        memory = size(total_memory(device))
        values[str(device)] = f"{torch.cuda.get_device_name(device)}, {memory}, CUDA {torch.version.cuda}"
    cache = cache_folder() / "tokens"
    taken = size(sum(path.stat().st_size for path in cache.rglob("*") if path.is_file()))
    values["cache"] = f"{cache}, {taken}, tokens of training data; to remove them: {quoted('rm', '-r', cache)}"
    return Environment(values | {name: os.environ[name] for name in _VARIABLES if name in os.environ})
