"""The demo's text: Python's own standard library, split by file name into training and held-out files.

Held-out files were chosen long, and unmoved from Python 3.10 to 3.13. Files do move between versions, so
names alone prove nothing: text is compared by hashes of windows of lines, and the hashes of what the demo
checkpoint was trained on lie beside it (TRAINED_WINDOWS). Owns the split; knows no tokenizer.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np

from ropecli.demo import FOLDER

HELD_OUT = (
    "argparse.py",
    "ast.py",
    "asyncio/tasks.py",
    "calendar.py",
    "configparser.py",
    "dataclasses.py",
    "difflib.py",
    "doctest.py",
    "email/_header_value_parser.py",
    "fractions.py",
    "functools.py",
    "heapq.py",
    "http/client.py",
    "http/cookiejar.py",
    "ipaddress.py",
    "mailbox.py",
    "optparse.py",
    "pdb.py",
    "platform.py",
    "plistlib.py",
    "random.py",
    "statistics.py",
    "subprocess.py",
    "tarfile.py",
    "tempfile.py",
    "threading.py",
    "traceback.py",
    "typing.py",
    "unittest/mock.py",
    "urllib/parse.py",
    "urllib/request.py",
    "xml/dom/minidom.py",
)
TRAINED_WINDOWS = FOLDER / "trained_windows.npy"

# Tables and generated text, which teach a language model little, and what is not the library's own.
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
_WINDOW_LINES = 8
_SHORTEST_LINE = 4
SAMPLING = 16
"""One window in SAMPLING is stored: of moved passages of 100 lines, 997 in 1000 are still seen."""


def stdlib_root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def read_source(path: Path) -> str | None:
    """The file's text with plain newlines; None where it is not UTF-8 (the library's tests hold such files)."""
    try:
        return path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return None


def held_out_files(root: Path | None = None) -> dict[str, str]:
    """Name -> text of the held-out files that this Python has."""
    root = root or stdlib_root()
    texts = ((name, read_source(root / name)) for name in HELD_OUT)
    return {name: text for name, text in texts if text}


def training_files(root: Path | None = None) -> Iterator[tuple[str, str]]:
    """(name, text) of every other source file that shares no window of lines with a held-out file, by name."""
    root = root or stdlib_root()
    kept_apart = set()
    for text in held_out_files(root).values():
        kept_apart |= line_windows(text)
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if name.as_posix() in HELD_OUT or _LEFT_OUT.intersection(name.parts):
            continue
        source = read_source(path)
        if source and kept_apart.isdisjoint(line_windows(source)):
            yield name.as_posix(), source


def line_windows(text: str) -> set[int]:
    """64-bit hashes of every run of 8 lines, indentation and all but empty lines left aside."""
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if len(line) >= _SHORTEST_LINE]
    runs = ("\n".join(lines[i : i + _WINDOW_LINES]) for i in range(len(lines) - _WINDOW_LINES + 1))
    return {int.from_bytes(hashlib.blake2b(run.encode(), digest_size=8).digest(), "little") for run in runs}


def sample_windows(windows: set[int]) -> np.ndarray:
    """The sorted, sampled hashes, uint64: what TRAINED_WINDOWS holds of the training files."""
    return np.array(sorted(window for window in windows if window % SAMPLING == 0), dtype=np.uint64)


def was_trained_on(text: str) -> bool:
    """Whether a passage of `text` was among what the demo checkpoint was trained on, whatever file it was in."""
    return np.isin(sample_windows(line_windows(text)), _trained_windows()).any().item()


@cache
def _trained_windows() -> np.ndarray:
    return np.load(TRAINED_WINDOWS)
