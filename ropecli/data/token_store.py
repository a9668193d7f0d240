"""A source's tokens on disk: written once, then memory-mapped, so that no process loads them all.

`datasets` writes and maps the file, atomically; processes that need the same file wait for the first. The cache folder
is $ROPECLI_CACHE, else $XDG_CACHE_HOME/ropecli, else ~/.cache/ropecli. A row holds documents of about a million tokens
as bytes (int32 ids, int64 lengths), which Arrow maps without copying. The last row holds their digest; a damaged file
is detected by it and written again. The file's key is computed from the source and the tokenizer (`source_identity`,
`tokenizer_digest`), without reading the text. A token that is not trained on is stored as ~id, which is negative.
"""

import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from ropecli.data.conversations import Conversation, tokenize_conversations
from ropecli.data.documents import Document, tokenize
from ropecli.data.sources import DEMO_TRAIN, HubDataset, Rows, files_of, locate
from ropecli.demo import corpus
from ropecli.errors import DataError, OutputError, reason_of

FORMAT = 1
"""Version of the file format; part of every key, so that files of another version are not read."""
_ROW_TOKENS = 1 << 20
_HUB_PATIENCE = 10.0
"""Timeout for reading a dataset's commit from the Hub, seconds."""


class TokenStore:
    """Tokenized documents by index. lengths: shape (documents,), int64. digest: sha256 of all lengths and ids.

    largest_id: largest token id, -1 if there are no tokens. masked: whether some tokens are not trained on.
    """

    def __init__(self, rows: list[tuple[np.ndarray, np.ndarray]], digest: str) -> None:
        self.digest = digest
        self.lengths = np.concatenate([lengths for lengths, _ in rows] or [np.empty(0, dtype=np.int64)])
        self._rows = [ids for _, ids in rows]
        limits = [(int(ids.min()), int(ids.max())) for ids in self._rows if len(ids)]
        self.masked = any(low < 0 for low, _ in limits)
        self.largest_id = max((max(~low, high) for low, high in limits), default=-1)
        self._first_documents = np.cumsum([0, *(len(lengths) for lengths, _ in rows)]).tolist()
        self._first_tokens = np.cumsum([0, *(len(ids) for _, ids in rows)]).tolist()
        self._starts = np.cumsum(self.lengths) - self.lengths

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.lengths)

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """A copy of the tokens start ≤ t < stop of a document, int64; ~id for those that are not trained on."""
        row = bisect_right(self._first_documents, document) - 1
        begin = int(self._starts[document]) - self._first_tokens[row]
        return self._rows[row][begin + start : begin + stop].astype(np.int64)


def cache_folder() -> Path:
    if own := os.environ.get("ROPECLI_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ropecli"


def open_store(key: str, rows: Callable[[], Rows], tokenizer, train_on: str | None = None) -> TokenStore:
    """Open the store of this key; if it is missing or damaged, tokenize `rows` in batches and write it.

    Reads the whole file once to verify it (about 2 GB/s). train_on: see tokenize_rows. Raises what `rows` raises,
    DataError for rows that cannot be tokenized, OutputError if the cache cannot be written.
    """
    from filelock import FileLock

    cache = cache_folder() / "tokens"
    folder = cache / key
    writing = _Writing(lambda: tokenize_rows(rows(), tokenizer, train_on))
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # the lock of datasets does not cover the removal of a damaged file
        with _quietly(), FileLock(cache / f"{key}.lock"):
            try:
                return _load(folder, writing)
            except Exception:
                if writing.begun:
                    raise
            shutil.rmtree(folder, ignore_errors=True)  # damaged
            return _load(folder, writing)
    except Exception as error:
        if writing.failure:
            raise writing.failure from None
        cause = error.__cause__ or error
        if isinstance(cause, OSError | NotImplementedError):  # NotImplementedError: the file system has no locks
            raise OutputError(
                f"Cannot write tokens to the cache {cache}: {reason_of(cause)}. Free some space, or set the "
                "environment variable ROPECLI_CACHE to a writable folder."
            ) from error
        raise


class _Writing:
    """Generates the rows of a store. failure: the original error, which `datasets` would wrap."""

    def __init__(self, documents: Callable[[], Iterator[Document]]) -> None:
        self._documents = documents
        self.begun = False
        self.failure: Exception | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """datasets names its files by a hash of this object, which must not change: the key names the folder."""
        return object, ()

    def rows(self) -> Iterator[dict[str, Any]]:
        self.begun = True
        digest = _Digest()
        try:
            for lengths, ids in _grouped(self._documents()):
                digest.add(lengths, ids)
                yield {"lengths": lengths.tobytes(), "ids": ids.tobytes(), "digest": ""}
        except Exception as error:
            self.failure = error
            raise
        yield {"lengths": b"", "ids": b"", "digest": digest.text()}


def tokenize_rows(rows: Rows, tokenizer, train_on: str | None) -> Iterator[Document]:
    """Tokenize texts and conversations. Document.ids has ~id where the token is not trained on.

    train_on: assistant or all, for conversations; None is assistant, and allows texts too. Raises DataError.
    """
    for are_conversations, group in groupby(rows, key=lambda row: isinstance(row[1], Conversation)):
        same: Iterator[tuple[str, Any]] = group
        if are_conversations:
            yield from tokenize_conversations(same, tokenizer, train_on or "assistant")
        elif train_on is None:
            yield from tokenize(same, tokenizer)
        else:
            raise DataError(
                f"{next(same)[0]} is text; train_on: {train_on} needs conversations. Remove train_on, or set "
                "text_column to their column."
            )


class _Digest:
    """sha256 of documents; independent of how they are grouped into rows."""

    def __init__(self) -> None:
        self._lengths, self._ids = hashlib.sha256(), hashlib.sha256()

    def add(self, lengths: np.ndarray, ids: np.ndarray) -> None:
        self._lengths.update(lengths.data)
        self._ids.update(ids.data)

    def text(self) -> str:
        return hashlib.sha256(self._lengths.digest() + self._ids.digest()).hexdigest()


def _grouped(documents) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(lengths, ids) of groups of documents with at least _ROW_TOKENS tokens together."""
    group: list[np.ndarray] = []
    tokens = 0
    for document in documents:
        largest = np.maximum(document.ids, ~document.ids).max(initial=0)
        if largest >= 1 << 31:
            raise DataError(f"{document.name}: token id {largest} does not fit into 31 bits.")
        group.append(document.ids.astype("<i4"))
        tokens += len(document.ids)
        if tokens >= _ROW_TOKENS:
            yield np.array([len(ids) for ids in group], dtype="<i8"), np.concatenate(group)
            group, tokens = [], 0
    if group:
        yield np.array([len(ids) for ids in group], dtype="<i8"), np.concatenate(group)


def _load(folder: Path, writing: _Writing) -> TokenStore:
    """Raises ValueError for a wrong digest, and many kinds of errors for unreadable files."""
    from datasets import Dataset, Features, Value

    columns = Features({"lengths": Value("large_binary"), "ids": Value("large_binary"), "digest": Value("string")})
    dataset = Dataset.from_generator(writing.rows, features=columns, cache_dir=str(folder), writer_batch_size=1)
    table = dataset.data
    rows = [
        (np.frombuffer(lengths.as_buffer(), dtype="<i8"), np.frombuffer(ids.as_buffer(), dtype="<i4"))
        for lengths, ids in zip(table.column("lengths"), table.column("ids"), strict=True)
    ]
    digest = _Digest()
    for lengths, ids in rows:
        digest.add(lengths, ids)
    if not rows or table.column("digest")[-1].as_py() != digest.text():
        raise ValueError("the digest does not match the tokens")
    return TokenStore(rows[:-1], digest.text())


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence the logs and progress bars of datasets, which are global; restore them afterwards."""
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    logger = logging.getLogger("datasets")
    level, silent = logger.level, are_progress_bars_disabled()
    logger.setLevel(logging.CRITICAL)
    disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if not silent:
            enable_progress_bars()


def source_identity(source: str, split: str, cache: Path) -> list[Any]:
    """Identity of a source as JSON: its files with sizes and times, or the commit of a Hub dataset.

    Includes mtime and ctime, because cp -p, tar and rsync -t preserve mtime. cache: stores the last commit seen, for
    when the Hub cannot be reached.
    """
    if source == DEMO_TRAIN:
        chooses = hashlib.sha256(Path(corpus.__file__).read_bytes()).hexdigest()
        root = corpus.stdlib_root()
        return [source, chooses, sys.version, str(root), root.stat().st_mtime_ns]
    try:
        found = locate(source)
    except DataError:  # reading the source will report it
        return ["hub", source, split, None]
    if isinstance(found, HubDataset):
        return ["hub", source, split, _commit(found.name, cache)]
    return ["files", *map(_stamp, files_of(found) if found.is_dir() else [found])]


def _stamp(path: Path) -> list[Any]:
    status = path.stat()
    return [str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _commit(dataset: str, cache: Path) -> str | None:
    from huggingface_hub import HfApi

    seen = cache / "hub" / dataset.replace("/", "--")
    try:
        commit = HfApi().dataset_info(dataset, timeout=_HUB_PATIENCE).sha
    except Exception:  # the Hub client raises many kinds; reading the source will report the error
        return seen.read_text(encoding="utf-8") if seen.is_file() else None
    if commit:
        with suppress(OSError):  # writing the tokens will report an unwritable cache
            seen.parent.mkdir(parents=True, exist_ok=True)
            seen.write_text(commit, encoding="utf-8")
    return commit


def tokenizer_digest(tokenizer) -> str:
    """sha256 over everything that determines how the tokenizer splits text."""
    sha = hashlib.sha256(type(tokenizer).__name__.encode())
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        # these are arguments of the last call
        backend = {key: value for key, value in backend.items() if key not in ("truncation", "padding")}
        # not part of the backend: whether special tokens in the text are split
        split = bool(getattr(tokenizer, "split_special_tokens", False))
        sha.update(json.dumps([backend, split], sort_keys=True).encode())
        return sha.hexdigest()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
            sha.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return sha.hexdigest()
