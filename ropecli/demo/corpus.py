"""The demo's text: Python's standard library, split by file name into training and held-out files.

Held-out files are long and have the same path in Python 3.10 to 3.13. Other files move between versions, so text is
also compared by hashes of windows of lines. The hashes of the training text are in TRAINED_WINDOWS.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np

from ropecli.demo import FOLDER

HELD_OUT = (
    "argparse.py", "ast.py", "asyncio/tasks.py", "calendar.py", "configparser.py", "dataclasses.py", "difflib.py",
    "doctest.py", "email/_header_value_parser.py", "fractions.py", "functools.py", "heapq.py", "http/client.py",
    "http/cookiejar.py", "ipaddress.py", "mailbox.py", "optparse.py", "pdb.py", "platform.py", "plistlib.py",
    "random.py", "statistics.py", "subprocess.py", "tarfile.py", "tempfile.py", "threading.py", "traceback.py",
    "typing.py", "unittest/mock.py", "urllib/parse.py", "urllib/request.py", "xml/dom/minidom.py",
)  # fmt: skip
TRAINED_WINDOWS = FOLDER / "trained_windows.npy"

# Tables, generated text, and code that is not part of the standard library.
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
_WINDOW_LINES = 8
_SHORTEST_LINE = 4
SAMPLING = 16
"""One window in SAMPLING is stored: enough to detect 997 of 1000 moved passages of 100 lines."""


def stdlib_root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def read_source(path: Path) -> str | None:
    """The file's text with newlines as \\n; None if it is not UTF-8, like some of the library's tests."""
    try:
        return path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return None


def held_out_files(root: Path | None = None) -> dict[str, str]:
    """Texts of the held-out files in this Python's library, by name."""
    root = root or stdlib_root()
    texts = ((name, read_source(root / name)) for name in HELD_OUT)
    return {name: text for name, text in texts if text}


def training_files(root: Path | None = None) -> Iterator[tuple[str, str]]:
    """(name, text) of all other source files that share no window of lines with a held-out file, sorted by name."""
    root = root or stdlib_root()
    held_out = set()
    for text in held_out_files(root).values():
        held_out |= line_windows(text)
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if name.as_posix() in HELD_OUT or _SKIPPED.intersection(name.parts):
            continue
        source = read_source(path)
        if source and held_out.isdisjoint(line_windows(source)):
            yield name.as_posix(), source


def line_windows(text: str) -> set[int]:
    """64-bit hashes of every run of 8 lines, ignoring indentation and lines shorter than 4 characters."""
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if len(line) >= _SHORTEST_LINE]
    runs = ("\n".join(lines[i : i + _WINDOW_LINES]) for i in range(len(lines) - _WINDOW_LINES + 1))
    return {int.from_bytes(hashlib.blake2b(run.encode(), digest_size=8).digest(), "little") for run in runs}


def sample_windows(windows: set[int]) -> np.ndarray:
    """Sampled hashes, sorted, uint64, as stored in TRAINED_WINDOWS."""
    return np.array(sorted(window for window in windows if window % SAMPLING == 0), dtype=np.uint64)


def was_trained_on(text: str) -> bool:
    """Return whether the demo checkpoint was trained on a passage of `text`, in whichever file."""
    return np.isin(sample_windows(line_windows(text)), _trained_windows()).any().item()


@cache
def _trained_windows() -> np.ndarray:
    return np.load(TRAINED_WINDOWS)
