"""Peak memory since a reset: allocated by torch on a GPU, the resident set of the process on a CPU."""

import re
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def reset_peak(device: torch.device) -> None:
    """Reset the peak. Without effect on CPUs outside Linux, where the peak of a process only grows."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _CLEAR.exists():
        try:
            _CLEAR.write_text("5")
        except OSError:
            return


def peak_memory(device: torch.device) -> int:
    """Peak since `reset_peak`, bytes; 0 if the system does not report it."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text(encoding="utf-8"))
    except OSError:
        found = None
    return int(found[1]) * 1024 if found else _largest_resident_set()


def _largest_resident_set() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
