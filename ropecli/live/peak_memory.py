"""Peak memory of a stretch of work: what torch allocated on a GPU, the process's resident set on a CPU."""

import re
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def reset_peak(device: torch.device) -> None:
    """Forgets the peak so far, where the system lets it: elsewhere than on Linux a process's peak only grows."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _CLEAR.exists():
        try:
            _CLEAR.write_text("5")
        except OSError:
            return


def peak_memory(device: torch.device) -> int:
    """Bytes at the peak since `reset_peak`; 0 where the system does not say."""
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
