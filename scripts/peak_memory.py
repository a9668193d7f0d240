"""The peak memory of a device, for measurements."""

import contextlib
import re
from pathlib import Path

import torch


def reset_peak(device: torch.device) -> None:
    """Reset the peak that `peak_memory` returns."""
    if device.type == "cuda":
        for number in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(number)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # 5 resets VmHWM, the peak of the resident set


def peak_memory(device: torch.device) -> int:
    """Peak since `reset_peak`, bytes; 0 if the system does not report it.

    For a GPU, the sum of this process's peaks on all GPUs; otherwise the resident set of the process.
    """
    if device.type == "cuda":
        return sum(int(torch.cuda.max_memory_allocated(number)) for number in range(torch.cuda.device_count()))
    with contextlib.suppress(OSError):
        if peak := re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8")):
            return int(peak[1]) * 1024
    return 0
