"""What a source's tokens hang on, as one digest, without reading the text: the key of the token cache."""

import hashlib
import json
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from ropecli.checkpoint.opening import HUB_ID
from ropecli.data.sources import DEMO_TRAIN, TABLE_FILES, TEXT_FILES
from ropecli.demo import corpus

_HUB_PATIENCE = 10.0
"""Seconds that the Hub may take to name a dataset's commit."""


def source_identity(source: str, split: str, cache: Path) -> list[Any]:
    """JSON: the files of a local source with their sizes and times, or the commit of a dataset on the Hub.

    Times are of the last change of content and of attributes: the first can be set back (cp -p, tar, rsync -t).
    cache: the folder where the commit seen last is kept, which stands in where the Hub cannot be reached.
    """
    if source == DEMO_TRAIN:
        chooses = hashlib.sha256(Path(corpus.__file__).read_bytes()).hexdigest()
        root = corpus.stdlib_root()
        return [source, chooses, sys.version, str(root), root.stat().st_mtime_ns]
    try:
        path = Path(source).expanduser()
        if path.is_file():
            return ["files", _stamp(path)]
        if path.is_dir() and source:
            kinds = TEXT_FILES | set(TABLE_FILES)
            return ["files", *(_stamp(one) for one in sorted(path.rglob("*")) if one.suffix in kinds and one.is_file())]
        is_hub_id = HUB_ID.fullmatch(source) and not path.parent.is_dir()
    except (OSError, RuntimeError, ValueError):
        is_hub_id = None  # whoever reads it says what is wrong
    return ["hub", source, split, _commit(source, cache) if is_hub_id else None]


def tokenizer_digest(tokenizer) -> str:
    """sha256 over what a tokenizer makes its tokens by."""
    sha = hashlib.sha256(type(tokenizer).__name__.encode())
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        # what the last call asked for, not how text becomes tokens
        backend = {key: value for key, value in backend.items() if key not in ("truncation", "padding")}
        # transformers keeps to itself whether special tokens in the text count as such
        split = bool(getattr(tokenizer, "split_special_tokens", False))
        sha.update(json.dumps([backend, split], sort_keys=True).encode())
        return sha.hexdigest()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
            sha.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return sha.hexdigest()


def _stamp(path: Path) -> list[Any]:
    status = path.stat()
    return [str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _commit(dataset: str, cache: Path) -> str | None:
    from huggingface_hub import HfApi

    seen = cache / "hub" / dataset.replace("/", "--")
    try:
        commit = HfApi().dataset_info(dataset, timeout=_HUB_PATIENCE).sha
    except Exception:  # the Hub client raises many kinds; reading the source will say what is wrong
        return seen.read_text(encoding="utf-8") if seen.is_file() else None
    if commit:
        with suppress(OSError):  # a cache that cannot be written is told of where the tokens are
            seen.parent.mkdir(parents=True, exist_ok=True)
            seen.write_text(commit, encoding="utf-8")
    return commit
