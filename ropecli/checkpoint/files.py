"""What a checkpoint's folder may hold: the names of its files, and how the small ones are read.

A folder may come from anyone. Only regular files are opened, JSON is bounded in size and depth, and a small file that
is a link out of the folder is refused: a patch would carry what it leads to, a private file perhaps, into its output.
Weights may lie elsewhere, as is common practice; their headers show that they are weights.
"""

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ropecli.errors import CheckpointError

CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
PROVENANCE = "ropecli.yaml"
TUNING = "tune.json"
FACTORS = "factors.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
WEIGHTS = "*.safetensors"
# What makes up a checkpoint. Code travels only with a config that names it.
CHECKPOINT_FILES = ["*.json", WEIGHTS, "*.model", "*.txt", "*.tiktoken", "*.jinja", "README.md", "LICENSE*"]
CODE = "*.py"
LARGEST_JSON = 32 * 2**20
_DEEPEST = 64


def is_file(path: Path) -> bool:
    """Whether there is a file. Raises CheckpointError for what is no file, or cannot be reached."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError) and not path.is_symlink():
            return False
        raise CheckpointError(f"{path} cannot be read: {error.strerror}. Fetch or copy it again.") from error
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, socket or device"
        raise CheckpointError(f"{path} is {kind}; a checkpoint has a file of that name, or none.")
    return True


def is_own_file(path: Path) -> bool:
    """`is_file` for a small file. Raises CheckpointError also for a link that leads out of the folder."""
    if not is_file(path):
        return False
    target = path.resolve()
    if path.is_symlink() and not any(target.is_relative_to(home) for home in _homes(path.parent.resolve())):
        raise CheckpointError(
            f"{path} is a link out of its folder, to {target}; only weights may lie elsewhere. "
            "Put a copy in its place, or name the folder that holds the files themselves."
        )
    return True


def _homes(folder: Path) -> list[Path]:
    """Where a folder's small files may lie: in it, and those of a snapshot in the Hub's cache among its blobs."""
    if folder.parent.name != "snapshots" or not folder.parents[1].name.startswith("models--"):
        return [folder]
    # what several repositories share lies beside them: blobs/<two digits>/<hash>
    return [folder, folder.parents[1] / "blobs", folder.parents[2] / "blobs"]


def read_text(path: Path, largest: int) -> str:
    """The text of a small file of a checkpoint. Raises CheckpointError, and what read_bounded raises.

    largest: bytes.
    """
    if not is_own_file(path):
        raise FileNotFoundError(f"there is no {path.name}")
    return read_bounded(path, largest)


def read_bounded(path: Path, largest: int) -> str:
    """The text of a file or a pipe. Raises OSError, and ValueError for what is no UTF-8 or too long.

    largest: bytes.
    """
    with path.open("rb") as file:
        data = file.read(largest + 1)  # a file's own size is no promise
    if len(data) > largest:
        raise ValueError(f"it holds more than {largest >> 10} KiB")
    return data.decode("utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Raises CheckpointError for a file that is too large, is not JSON, or does not hold an object."""
    try:
        value = json.loads(read_text(path, LARGEST_JSON))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}; an object was expected.")
    try:
        for _ in values(value):
            pass
    except ValueError as error:
        raise CheckpointError(f"{path} is {error}; no model's files are.") from error
    return value


def values(value: Any) -> Iterator[Any]:
    """Every value within, lists and objects too. Raises ValueError when they are nested too deep."""
    open_values = [iter([value])]
    while open_values:
        for inner in open_values[-1]:
            yield inner
            if isinstance(inner, dict | list):
                open_values.append(iter(inner.values() if isinstance(inner, dict) else inner))
                break
        else:
            open_values.pop()
        if len(open_values) > _DEEPEST + 1:
            raise ValueError(f"nested more than {_DEEPEST} levels deep")
