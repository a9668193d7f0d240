"""Finds a checkpoint (a folder, a Hub id, or `demo`), checks its files, and reads its JSON files."""

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ropecli.checkpoint import files, hub
from ropecli.errors import CheckpointError, quoted, shown
from ropecli.hashing import digest, sha256_of
from ropecli.names import checkpoint_folder, refuse_without_config

# Names that git accepts, without those that would leave the cache's refs folder.
_REVISION = re.compile(r"(?!.*\.\.)[^\s/][^\s]*")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's folder and config.

    name: as given by the user. config: the content of config.json. revision, commit: for a Hub id, the requested
    revision and the commit it resolved to. base: for an adapter, its base model. has_weights: false for a Hub id whose
    weights were not asked for. memory: of read_state.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    revision: str | None = None
    commit: str | None = None
    base: "Checkpoint | None" = None
    has_weights: bool = True
    memory: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def configured(self) -> Path:
        """The folder with config.json: the base's, for an adapter that peft wrote."""
        return self.base.folder if self.base and not files.is_own_file(self.folder / files.CONFIG) else self.folder

    @property
    def tokenizer_config(self) -> dict[str, Any] | None:
        path = self.folder / files.TOKENIZER_CONFIG
        return files.read_json(path) if files.is_own_file(path) else None

    @cached_property
    def record(self) -> dict[str, Any]:
        """The content of ropecli.yaml, read once; empty if there is none. Raises CheckpointError."""
        return files.read_record(self.configured)

    def weight_files(self) -> list[Path]:
        """The safetensors files that transformers reads: some folders have the same weights in another form as well.

        Raises CheckpointError if there are none, or one is missing or damaged.
        """
        if self.base:
            return self.base.weight_files()
        listed, names = files.indexed_weights(self.folder), {path.name for path in files.weights_in(self.folder)}
        # compare names only: files outside of the folder count as missing
        if missing := sorted(set(listed) - names):
            what = f"the index of the weights lists {missing[0][:100]}, which is not in {self.folder}"
            raise CheckpointError(f"{self.name}: {what}.")
        if listed and files.WHOLE in names.difference(listed):
            raise CheckpointError(
                f"{self.name}: {self.folder} has the weights twice: transformers reads model.safetensors, other "
                f"engines the files of its index, such as {listed[0]}. Remove the older ones."
            )
        if not names:
            pickled = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in self.folder.glob(pattern)]
            hint = f" {pickled[0]} is a pickle, which is not supported: convert it to safetensors." if pickled else ""
            if other := next(self.folder.glob(files.WEIGHTS), None):
                hint = f" {other.name} is in Mistral's own format, which transformers does not read: convert it."
            raise CheckpointError(f"{self.name}: no *.safetensors weights in {self.folder}.{hint}")
        in_use = listed or sorted({files.WHOLE} & names or names)
        for name in in_use:
            _check_header(self.folder / name)
        return [self.folder / name for name in in_use]

    def files(self) -> list[Path]:
        """The files to copy: all files of the checkpoint except config.json, ropecli's own, and `skipped_files`.

        Raises CheckpointError for special files, and for a small file that is a link out of the folder.
        """
        names_code = self.config.get("auto_map") or (self.tokenizer_config or {}).get("auto_map")
        patterns = [*files.CHECKPOINT_FILES, files.CODE] if names_code else files.CHECKPOINT_FILES
        return [
            path
            for path in sorted(self.folder.iterdir())
            if not path.is_dir()
            and path.name not in (files.CONFIG, files.PROVENANCE, files.EXTENSION)
            and not files.is_of_mistral(path)
            and any(path.match(pattern) for pattern in patterns)
            and (path.match(files.WEIGHTS) or files.is_own_file(path))
        ]

    def skipped_files(self) -> list[str]:
        """Names of files that are not copied, because engines read them instead of config.json and its weights."""
        return sorted({path.name for pattern in files.MISTRAL_FORMAT for path in self.folder.glob(pattern)})

    @property
    def skip_warning(self) -> str:
        """A sentence about `skipped_files`; empty if there are none."""
        names = ", ".join(self.skipped_files())
        read = "which engines such as vLLM read instead of config.json and its weights"
        return f"skipping {names}, {read}." if names else ""

    @cached_property
    def digest(self) -> str:
        """`sha256:` and the sha256 of config.json and all weights; without weights, `commit:`. Raises CheckpointError.

        A process reads each file once, also for other checkpoints that link to it.
        """
        if not self.has_weights:
            return f"commit:{self.commit}"
        paths = [path for path in files.weights_in(self.folder) if files.is_file(path)]
        names = [path.name for path in paths]
        return f"sha256:{digest(self.config, names, _hashes_of(paths), self.base and self.base.digest)}"

    def origin(self, *, digest: bool = True) -> dict[str, Any]:
        """Name, revision, commit and digest, for records of where something came from.

        digest: false to read no weights of a Hub id, which its commit identifies.
        """
        pinned = {"revision": self.revision, "commit": self.commit} if self.commit else {}
        return {"checkpoint": self.name, **pinned, **({"digest": self.digest} if digest or not pinned else {})}


_hashes: dict[tuple[object, ...], str] = {}


def _hashes_of(paths: list[Path]) -> list[str]:
    """The sha256 of each file, from memory if the process has read it or another link to it. Raises OSError."""
    files = []
    for path in paths:
        status = path.stat()
        files.append((path.name, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
    missing = {file: path for file, path in zip(files, paths, strict=True) if file not in _hashes}
    _hashes.update(zip(missing, sha256_of(missing.values()), strict=True))
    return [_hashes[file] for file in files]


def open_checkpoint(
    name: str | Path,
    *,
    weights: bool = False,
    tokenizer: bool = False,
    revision: str | None = None,
    adapters: bool = False,
) -> Checkpoint:
    """Open CHECKPOINT: a folder, `demo`, or a Hub id (`owner/name`).

    Of a Hub id, the small config files are downloaded. weights: all files. tokenizer: all but the weights. revision: a
    branch, tag or commit. adapters: also accept an adapter, with its base model. Raises CheckpointError.
    """
    folder, commit = checkpoint_folder(name), None
    if folder is None:
        if revision is not None and not _REVISION.fullmatch(revision):
            raise CheckpointError(f"--revision is {shown(revision)}; expected a branch, tag or commit.")
        folder = hub.fetch(str(name), revision, weights=weights, tokenizer=tokenizer)
        revision, commit = revision or hub.DEFAULT_REVISION, folder.name
    elif revision is not None:
        raise CheckpointError(f"--revision is {revision[:60]}, but {name} is not a Hub id. Remove --revision.")
    # one that ropecli wrote has a config.json like a checkpoint
    weight_names = {path.name for path in files.weights_in(folder)}
    is_adapter = files.is_own_file(folder / files.ADAPTER_CONFIG) and weight_names <= {files.ADAPTER_WEIGHTS}
    if is_adapter and not adapters:
        raise CheckpointError(
            f"{name} is an adapter. Merge it with its base model: ropecli merge {quoted(name)} --output DIR."
        )
    base = adapter_base(folder) if is_adapter else None
    if files.is_own_file(folder / files.CONFIG):
        config = files.read_json(folder / files.CONFIG)
    elif base is None:
        refuse_without_config(name, folder)
    else:
        config = base.config
    has_weights = weights or not commit
    checkpoint = Checkpoint(str(name), folder, config, revision, commit, base, has_weights)
    if weights or tokenizer:  # fail now, not after hours
        _refuse_kernels(checkpoint)
        checkpoint.files()
    return checkpoint


def adapter_base(adapter: Path, revision: str | None = None) -> Checkpoint:
    """Open the base model named in adapter_config.json, with its weights. Raises CheckpointError.

    revision: overrides the revision in adapter_config.json.
    """
    config = files.read_json(adapter / files.ADAPTER_CONFIG)
    name, pinned = config.get("base_model_name_or_path"), revision or config.get("revision")
    if not name or not isinstance(name, str) or not isinstance(pinned, str | None):
        raise CheckpointError(f"{adapter / files.ADAPTER_CONFIG} names no base. Set it by ropecli merge --base NAME.")
    try:
        return open_checkpoint(name, weights=True, revision=pinned)
    except CheckpointError as error:
        base = f"Cannot open the base model of {adapter}"
        raise CheckpointError(f"{base}: {error} Name it: ropecli merge --base CHECKPOINT.") from error


def _refuse_kernels(checkpoint: Checkpoint) -> None:
    """Refuse attention kernels from the Hub: transformers would download and run them (with the `kernels` package)."""
    parts = [checkpoint.config]
    for part in parts:
        parts += [value for value in part.values() if isinstance(value, dict)]
        for key, value in part.items():
            if "attn_implementation" in key and "/" in str(value):
                raise CheckpointError(
                    f"{checkpoint.name}: config.json requests attention code from the Hub ({key}: {shown(value)}), "
                    f"which ropecli does not run. Remove {key}."
                )


def _check_header(path: Path) -> None:
    """Check the safetensors header against the file's size, without reading tensors."""
    from safetensors import SafetensorError, safe_open

    try:
        files.is_file(path)  # opening a pipe would block
        path.open("rb").close()  # safetensors reports any failure to open as a missing file
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged, or not safetensors: {error}. Copy it again.") from error
