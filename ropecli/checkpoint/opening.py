"""Finds a checkpoint and reads its JSON files. Owns what CHECKPOINT means, and which files make one up.

Loads neither torch nor transformers.
"""

import fnmatch
import hashlib
import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ropecli import demo
from ropecli.checkpoint import hub
from ropecli.checkpoint.files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CHECKPOINT_FILES,
    CODE,
    CONFIG,
    FACTORS,
    PROVENANCE,
    TOKENIZER_CONFIG,
    TUNING,
    WEIGHTS,
    is_file,
    is_own_file,
    read_json,
    values,
)
from ropecli.errors import CheckpointError, shown

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# What git takes for a name, without what would lead out of the cache's folder of names.
_REVISION = re.compile(r"(?!.*\.\.)[^\s/][^\s]*")
_SAMPLE = 2**20


@dataclass(frozen=True)
class Checkpoint:
    """name: as the user gave it. folder: where its files are. config: config.json as it stands.

    revision, commit: of a Hub id, what was asked for and the commit that it stood for. base: of an adapter, the
    checkpoint whose weights it is added to.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    revision: str | None = None
    commit: str | None = None
    base: "Checkpoint | None" = None

    @property
    def tokenizer_config(self) -> dict[str, Any] | None:
        path = self.folder / TOKENIZER_CONFIG
        return read_json(path) if is_own_file(path) else None

    def weight_files(self) -> list[Path]:
        """The safetensors files. Raises CheckpointError where there are none, or one is missing or damaged."""
        if self.base:
            return self.base.weight_files()
        found = sorted(self.folder.glob(WEIGHTS))
        index = self.folder / "model.safetensors.index.json"
        if is_own_file(index):
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise CheckpointError(f"{index} names no weights: its weight_map is no object.")
            # Names alone: one that leads elsewhere is none of the folder's.
            missing = sorted({str(name) for name in weight_map.values()} - {path.name for path in found})
            if missing:
                name = missing[0][:100]
                raise CheckpointError(f"{self.name}: {index.name} names {name}, which is not in {self.folder}.")
        if not found:
            pickled = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in self.folder.glob(pattern)]
            hint = f" {pickled[0]} is pickled and is not read: convert it to safetensors first." if pickled else ""
            raise CheckpointError(f"{self.name}: no *.safetensors weights in {self.folder}.{hint}")
        for path in found:
            _check_header(path)
        return found

    def files(self) -> list[Path]:
        """The files that make up the checkpoint, without those that are written anew: config.json and ropecli's own.

        Raises CheckpointError for what is no file, and for a small file that is a link out of the folder.
        """
        names_code = self.config.get("auto_map") or (self.tokenizer_config or {}).get("auto_map")
        patterns = [*CHECKPOINT_FILES, CODE] if names_code else CHECKPOINT_FILES
        try:
            paths = [path for path in sorted(self.folder.iterdir()) if not path.is_dir()]
        except OSError as error:
            raise CheckpointError(f"{self.folder} cannot be listed: {error.strerror}.") from error
        paths = [path for path in paths if path.name not in (CONFIG, PROVENANCE, TUNING, FACTORS)]
        paths = [path for path in paths if any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns)]
        return [path for path in paths if fnmatch.fnmatch(path.name, WEIGHTS) or is_own_file(path)]

    def digest(self) -> str:
        """sha256 over config.json and, of each weight file, the name, the size, and the first and last MiB.

        As they were when it was first asked for.
        """
        return self._digest

    @cached_property
    def _digest(self) -> str:
        sha = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for path in sorted(self.folder.glob(WEIGHTS)):
            if not is_file(path):
                continue
            size = path.stat().st_size
            sha.update(f"{path.name} {size}".encode())
            with path.open("rb") as file:
                sha.update(file.read(_SAMPLE))
                file.seek(max(0, size - _SAMPLE))
                sha.update(file.read(_SAMPLE))
        if self.base:
            sha.update(self.base.digest().encode())
        return sha.hexdigest()

    def origin(self) -> dict[str, Any]:
        """What a record says of where something came from."""
        pinned = {"revision": self.revision, "commit": self.commit} if self.commit else {}
        return {"checkpoint": self.name, **pinned, "digest": self.digest()}


def open_checkpoint(
    name: str | Path, *, weights: bool = False, revision: str | None = None, adapters: bool = False
) -> Checkpoint:
    """Finds CHECKPOINT: a folder, `demo`, or a Hub id (`owner/name`).

    weights: all files will be needed: of a Hub id, fetch them rather than the small config files alone.
    revision: of a Hub id, a branch, tag or commit. adapters: accept the folder of an adapter that ropecli wrote, on
    the base that it names. Raises CheckpointError.
    """
    fetched = hub.Fetched(demo.FOLDER) if str(name) == demo.NAME else _local(name)
    if fetched is None:
        if revision is not None and not _REVISION.fullmatch(revision):
            raise CheckpointError(f"--revision is {shown(revision)}; it must be a branch, a tag or a commit.")
        fetched = hub.fetch(str(name), revision, weights=weights)
    elif revision is not None:
        raise CheckpointError(
            f"--revision {revision[:60]} was given, but {name} is no Hub id: it is read as it is on this disk. "
            "Leave --revision out."
        )
    folder = fetched.folder
    has_config, is_adapter = is_own_file(folder / CONFIG), _is_adapter(folder)
    if is_adapter and not (adapters and has_config):
        raise CheckpointError(f"{name} is an adapter; make it whole first: ropecli merge {name} --output DIR.")
    if not has_config:
        raise CheckpointError(f"{name}: no {CONFIG} in {folder}. A checkpoint's folder holds one.")
    base = adapter_base(folder) if is_adapter else None
    checkpoint = Checkpoint(str(name), folder, read_json(folder / CONFIG), fetched.revision, fetched.commit, base)
    if weights:  # what a command would refuse after hours is refused before
        _refuse_kernels(checkpoint)
        checkpoint.files()
    return checkpoint


def adapter_base(adapter: Path, revision: str | None = None) -> Checkpoint:
    """The checkpoint that adapter_config.json names as the adapter's base, with its weights. Raises CheckpointError.

    revision: of a Hub id, other than the one that is named there.
    """
    config = read_json(adapter / ADAPTER_CONFIG)
    name, pinned = config.get("base_model_name_or_path"), revision or config.get("revision")
    if not name or not isinstance(name, str) or not isinstance(pinned, str | None):
        raise CheckpointError(f"{adapter}: {ADAPTER_CONFIG} names no base. Name it: ropecli merge --base CHECKPOINT.")
    try:
        return open_checkpoint(name, weights=True, revision=pinned)
    except CheckpointError as error:
        raise CheckpointError(
            f"{adapter} names a base that cannot be opened: {error} Name it: ropecli merge --base CHECKPOINT."
        ) from error


def _is_adapter(folder: Path) -> bool:
    """Its config.json alone would pass for a checkpoint's."""
    return is_own_file(folder / ADAPTER_CONFIG) and all(path.name == ADAPTER_WEIGHTS for path in folder.glob(WEIGHTS))


def _local(name: str | Path) -> hub.Fetched | None:
    """The folder of that name, None where `name` can only be a Hub id."""
    folder = _as_path(name)
    if folder.is_dir():
        return hub.Fetched(folder)
    if folder.exists():
        raise CheckpointError(f"{name} is a file; a checkpoint is a folder that holds {CONFIG}.")
    # runs/typo is meant for a folder where runs/ is one: no need to wait for the Hub's refusal
    if not HUB_ID.fullmatch(str(name)) or folder.parent.is_dir():
        raise CheckpointError(f"No folder {name}. A checkpoint is a folder, a Hub id (owner/name), or 'demo'.")
    return None


def _as_path(name: str | Path) -> Path:
    try:
        path = Path(name).expanduser()
        path.exists()  # a name that no file can have shows here
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{str(name)[:80]!r} cannot be the name of a folder: {error}"[:300]) from error
    return path


def _refuse_kernels(checkpoint: Checkpoint) -> None:
    """transformers would fetch them from the Hub and run them, where the `kernels` package is installed."""
    for part in values(checkpoint.config):
        for key in [key for key in part if "attn_implementation" in key] if isinstance(part, dict) else []:
            if any(isinstance(name, str) and "/" in name for name in values(part[key])):
                raise CheckpointError(
                    f"{checkpoint.name}: config.json asks for attention code from the Hub ({key}: {shown(part[key])}), "
                    f"which is not run. Remove {key}."
                )


def _check_header(path: Path) -> None:
    """Holds the header against the file's size, without reading tensors."""
    from safetensors import SafetensorError, safe_open

    try:
        if path.exists():
            is_file(path)  # opening a pipe would wait for ever
        path.open("rb").close()  # to safetensors, whatever does not open is not there
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or no safetensors file: {error}. Fetch or copy it again.") from error
