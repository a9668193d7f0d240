"""Finds a checkpoint and reads its JSON files. Owns what CHECKPOINT means; refuses what is not plain JSON.

Loads neither torch nor transformers.
"""

import contextlib
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropecli import demo
from ropecli.errors import CheckpointError, reason_of

CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
_LARGEST_JSON = 32 * 2**20
_DEEPEST_JSON = 64
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# What makes up a checkpoint. Code travels only with a config that names it.
CHECKPOINT_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.tiktoken", "*.jinja", "README.md", "LICENSE*"]
_HUB_PATTERNS = [*CHECKPOINT_FILES, "*.py", "ropecli.yaml"]
_HUB_IGNORED = ["*/*", "consolidated*"]
_SAMPLE = 2**20


@dataclass(frozen=True)
class Checkpoint:
    """name: as the user gave it. folder: where its files are. config: config.json as it stands."""

    name: str
    folder: Path
    config: dict[str, Any]

    @property
    def tokenizer_config(self) -> dict[str, Any] | None:
        path = self.folder / TOKENIZER_CONFIG
        return read_json(path) if path.is_file() else None

    def weight_files(self) -> list[Path]:
        """The safetensors files. Raises CheckpointError where there are none, or one is missing or damaged."""
        found = sorted(self.folder.glob("*.safetensors"))
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise CheckpointError(f"{index} names no weights: its weight_map is no object.")
            names = {str(name) for name in weight_map.values()}
            missing = sorted(names - {path.name for path in found})
            if missing:
                raise CheckpointError(f"{self.name}: {index.name} names {missing[0]}, which is not in {self.folder}.")
        if not found:
            pickled = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in self.folder.glob(pattern)]
            hint = f" {pickled[0]} is pickled and is not read: convert it to safetensors first." if pickled else ""
            raise CheckpointError(f"{self.name}: no *.safetensors weights in {self.folder}.{hint}")
        for path in found:
            _check_header(path)
        return found

    def digest(self) -> str:
        """sha256 over config.json and, of each weight file, the name, the size, and the first and last MiB."""
        sha = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for path in sorted(self.folder.glob("*.safetensors")):
            size = path.stat().st_size
            sha.update(f"{path.name} {size}".encode())
            with path.open("rb") as file:
                sha.update(file.read(_SAMPLE))
                file.seek(max(0, size - _SAMPLE))
                sha.update(file.read(_SAMPLE))
        return sha.hexdigest()


def open_checkpoint(name: str | Path, *, weights: bool = False) -> Checkpoint:
    """Finds CHECKPOINT: a folder, `demo`, or a Hub id (`owner/name`).

    weights: of a Hub id, fetch all files rather than the two config files alone. Raises CheckpointError.
    """
    if str(name) == demo.NAME:
        folder = demo.FOLDER
    elif not (folder := _as_path(name)).is_dir():
        if folder.exists():
            raise CheckpointError(f"{name} is a file; a checkpoint is a folder that holds {CONFIG}.")
        # runs/typo is meant for a folder where runs/ is one: no need to wait for the Hub's refusal
        if not HUB_ID.fullmatch(str(name)) or folder.parent.is_dir():
            raise CheckpointError(f"No folder {name}. A checkpoint is a folder, a Hub id (owner/name), or 'demo'.")
        folder = _from_hub(str(name), weights)
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"{name}: no {CONFIG} in {folder}. A checkpoint's folder holds one.")
    return Checkpoint(str(name), folder, read_json(folder / CONFIG))


def _as_path(name: str | Path) -> Path:
    try:
        path = Path(name).expanduser()
        path.exists()  # a name that no file can have shows here
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{str(name)[:80]!r} cannot be the name of a folder: {error}"[:300]) from error
    return path


def read_json(path: Path) -> dict[str, Any]:
    """Raises CheckpointError for a file that is too large, is not JSON, or does not hold an object."""
    try:
        if path.stat().st_size > _LARGEST_JSON:
            raise CheckpointError(f"{path} is {path.stat().st_size >> 20} MiB; at most {_LARGEST_JSON >> 20} are read.")
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}; an object was expected.")
    if _depth(value) > _DEEPEST_JSON:
        raise CheckpointError(f"{path} is nested more than {_DEEPEST_JSON} levels deep; no model's files are.")
    return value


def _depth(value: Any) -> int:
    level, depth = [value], 0
    while level:
        depth += 1
        inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [item for items in inner for item in items]
    return depth


def section_of(config: dict[str, Any]) -> dict[str, Any]:
    """The part that holds the RoPE fields: all of it or, in composite models, `text_config`."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _check_header(path: Path) -> None:
    """Holds the header against the file's size, without reading tensors."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or no safetensors file: {error}. Fetch or copy it again.") from error


def _from_hub(name: str, weights: bool) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import EntryNotFoundError
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # five retries are not worth a line each
    try:
        if weights:
            return Path(snapshot_download(name, allow_patterns=_HUB_PATTERNS, ignore_patterns=_HUB_IGNORED))
        config = hf_hub_download(name, CONFIG)
        for beside in (TOKENIZER_CONFIG, "ropecli.yaml"):
            with contextlib.suppress(EntryNotFoundError):  # not every checkpoint has them
                hf_hub_download(name, beside)
        return Path(config).parent
    except Exception as error:  # the Hub client raises many kinds; each means that the name gave no folder
        raise CheckpointError(f"{name} is no folder here, and the Hub did not give it: {reason_of(error)}") from error
