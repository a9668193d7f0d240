"""A source's tokens on disk: written once, then memory-mapped, so that no process loads them all.

The cache folder is $ROPECLI_CACHE, else $XDG_CACHE_HOME/ropecli, else ~/.cache/ropecli.

CACHE/tokens/KEY/lengths.bin      tokens of each document, int64
CACHE/tokens/KEY/ids.bin          tokens of all documents, int32
CACHE/tokens/KEY/trained.bin      whether to train on each token, one byte
CACHE/tokens/KEY/turns.bin        the first token of each turn of all conversations, int64
CACHE/tokens/KEY/turn_counts.bin  turns of each document, int64; 0 for a text
CACHE/tokens/KEY/digest           sha256 of the documents; a damaged store is detected by it and written again
CACHE/tokens/KEY/remarks          sentences about what was skipped or not used, a line each; empty for none

KEY is computed from the source and the tokenizer, without reading the text. The files of a source are tokenized in
shards of 64 MiB or one file, each under its own KEY, so that a failure or a change loses one of them.
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ropecli.atomic import new_folder
from ropecli.data.conversations import tokenize_conversations
from ropecli.data.documents import Document, tokenize
from ropecli.data.files import DataFile, UnreachableError
from ropecli.data.formats import Conversation, Fault
from ropecli.data.sources import Rows, Source, describe_faults
from ropecli.demo import corpus
from ropecli.errors import DataError, OutputError, reason_of, shortened
from ropecli.hashing import digest
from ropecli.messages import warn

_FORMAT = 6
"""Version of the files and of how rows are read; part of every key, so that files of another version are not read."""
UNKNOWN_END = -1
"""The end of a text, if nobody knows it."""
_DIGEST, _REMARKS = "digest", "remarks"
_TYPES = {"lengths": "<i8", "ids": "<i4", "trained": "?", "turns": "<i8", "turn_counts": "<i8"}
"""Types of a shard's arrays, by name."""
_PIECE = 1 << 20
_SHARD = 1 << 26
"""Bytes of text, compressed or not."""


class Shard(NamedTuple):
    """The tokens of some files. lengths: shape (documents,), int64. turn_counts: the same shape, 0 for a text.

    ids, trained, turns: see Document; of all documents, one after the other. remarks: on what was skipped.
    """

    lengths: np.ndarray
    ids: np.ndarray
    trained: np.ndarray
    turns: np.ndarray
    turn_counts: np.ndarray
    remarks: Sequence[str] = ()


class TokenStore:
    """Tokenized documents by index, of all shards. lengths, turns, turn_counts: see Shard.

    masked: whether some tokens are not trained on. largest_id: -1 without tokens. digest: sha256 of all lengths, ids,
    what is trained on, and turns.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = [shard for shard in shards if len(shard.ids)]
        self._ends = np.cumsum([len(shard.ids) for shard in self._shards])
        self.lengths = np.concatenate([shard.lengths for shard in shards])
        self.turns = np.concatenate([shard.turns for shard in shards])
        self.turn_counts = np.concatenate([shard.turn_counts for shard in shards])
        self._first_turns = np.cumsum(self.turn_counts) - self.turn_counts
        self._starts = np.cumsum(self.lengths) - self.lengths
        self.masked, self.largest_id = False, -1
        tokens = hashlib.sha256()
        for shard in self._shards:
            for start in range(0, len(shard.ids), _PIECE):
                ids, trained = shard.ids[start : start + _PIECE], shard.trained[start : start + _PIECE]
                self.masked |= not trained.all()
                self.largest_id = max(self.largest_id, int(ids.max()))
                tokens.update(np.where(trained, ids, ~ids).astype("<i4").tobytes())
        self.digest = digest(self.lengths, tokens.hexdigest(), self.turn_counts, self.turns)

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.lengths)

    @property
    def has_conversations(self) -> bool:
        return len(self.turns) > 0

    @property
    def has_texts(self) -> bool:
        return bool((self.turn_counts == 0).any())

    def turns_of(self, document: int) -> np.ndarray:
        """The first token of each turn of a conversation; empty for a text."""
        first = int(self._first_turns[document])
        return self.turns[first : first + int(self.turn_counts[document])]

    def turn_ends(self, document: int) -> np.ndarray:
        """The token after each turn; one more where the first token of the next message ends an answer."""
        size, turns = int(self.lengths[document]), self.turns_of(document)[1:]
        if self.masked:
            trained = np.append(self.read(document, 0, size)[1], False)
            turns = turns + (trained[turns] & ~trained[turns + 1])
        return np.append(turns, size)

    def read(self, document: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, int64, and whether to train on them, bool) of the tokens start ≤ t < stop of a document, as copies."""
        number = int(np.searchsorted(self._ends, self._starts[document], side="right"))
        shard = self._shards[number]
        first = int(self._starts[document] - self._ends[number]) + len(shard.ids)
        part = slice(first + start, first + stop)
        return shard.ids[part].astype(np.int64), shard.trained[part].astype(bool)


def cache_folder() -> Path:
    if chosen := os.environ.get("ROPECLI_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ropecli"


def open_store(
    source: Source,
    tokenizer,
    train_on: str | None,
    *,
    end: int | None = None,
    drop_unrendered: bool = False,
) -> TokenStore:
    """Open the store of a source; tokenize and write what is missing or damaged of it.

    Reads the whole store once to verify it (about 2 GB/s). end: the token after each text. drop_unrendered: keep
    conversations of which the chat template leaves something out. Raises DataError, and OutputError if the cache cannot
    be written.
    """
    files = last_seen_files(source, cache_folder() / "hub")
    settings = [_FORMAT, source.column, source.skip_faulty, source.limit, train_on]
    settings += [tokenizer_digest(tokenizer), end, drop_unrendered]

    def documents(part: Sequence[DataFile]) -> Iterator[Document | str]:
        faults, lost, unused = list[Fault](), list[str](), set[str]()
        for document in tokenize_rows(source.rows(part), tokenizer, train_on, end, drop_unrendered):
            if isinstance(document, Fault):
                faults.append(document)
                continue
            lost.extend([f"{document.name}: {document.lost}"] if document.lost else [])
            unused.update(document.unused)
            yield document
        if faults and not source.skip_faulty:
            more = f" {len(faults):,} rows have such faults." if len(faults) > 1 else ""
            raise DataError(f"{faults[0].message}{more}")
        if faults:
            yield describe_faults(faults)
        if lost:
            conversations = f"{len(lost):,} conversation{'s'[: len(lost) > 1]}"
            yield f"The chat template leaves out parts of {conversations}. The first: {lost[0]}."
        if unused:
            yield f"{source.place}: nothing reads {shortened(', '.join(sorted(unused)), 300)}."

    # a limit counts the rows of all files
    parts = [files] if source.is_demo or source.limit is not None else _shards(files)
    shards = [open_shard(digest([*settings, source_identity(source, part)]), documents(part)) for part in parts]
    for remark in dict.fromkeys(remark for shard in shards for remark in shard.remarks):
        warn(remark)
    return TokenStore(shards)


def _shards(files: Sequence[DataFile]) -> Iterator[Sequence[DataFile]]:
    """Neighbouring files of some size together. Each is tokenized as a whole, so that a failure loses one at most."""
    part: list[DataFile] = []
    size = 0
    for file in files:
        part.append(file)
        size += _SHARD if file.is_on_hub else Path(file.address).stat().st_size
        if size >= _SHARD:
            yield part
            part, size = [], 0
    if part:
        yield part


def open_shard(key: str, documents: Iterable[Document | str]) -> Shard:
    """Open the shard of this key; if it is missing or damaged, write it. Other processes wait. Raises OutputError.

    documents: not begun if the shard is there; at the end come remarks, which the shard keeps.
    """
    from filelock import FileLock

    cache = cache_folder() / "tokens"
    folder = cache / key
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{key}.lock"):
            with suppress(OSError, ValueError):  # missing or damaged
                shard = _map(folder)
                if TokenStore([shard]).digest == (folder / _DIGEST).read_text(encoding="utf-8"):
                    return shard
            shutil.rmtree(folder, ignore_errors=True)
            with new_folder(folder) as partial:
                _write(partial, documents)
                (partial / _DIGEST).write_text(TokenStore([_map(partial)]).digest, encoding="utf-8")
            return _map(folder)
    except (OSError, OutputError, NotImplementedError) as error:  # NotImplementedError: no locks on this file system
        raise OutputError(
            f"Cannot write tokens to the cache {cache}: {reason_of(error)}. Free some space, or set the environment "
            "variable ROPECLI_CACHE to a writable folder."
        ) from error


def _write(folder: Path, documents: Iterable[Document | str]) -> None:
    remarks = []
    with ExitStack() as stack:
        files = {name: stack.enter_context((folder / f"{name}.bin").open("wb")) for name in _TYPES}
        for document in documents:
            if isinstance(document, str):
                remarks.append(document)
                continue
            size = len(document.ids)
            trained = np.ones(size) if document.trained is None else document.trained
            turns = () if document.turns is None else document.turns
            arrays = {"ids": document.ids, "trained": trained, "turns": turns}
            for name, array in {**arrays, "lengths": size, "turn_counts": len(turns)}.items():
                files[name].write(np.asarray(array).astype(_TYPES[name]).tobytes())
    (folder / _REMARKS).write_text("\n".join(remarks), encoding="utf-8")


def _map(folder: Path) -> Shard:
    """Raises OSError for missing files, ValueError for files of a size that does not fit."""

    def array(name: str) -> np.ndarray:
        path = folder / f"{name}.bin"
        return np.memmap(path, _TYPES[name], mode="r") if path.stat().st_size else np.empty(0, _TYPES[name])

    remarks = (folder / _REMARKS).read_text(encoding="utf-8").splitlines()
    return Shard(**{name: array(name) for name in _TYPES}, remarks=remarks)


def tokenize_rows(
    rows: Rows, tokenizer, train_on: str | None, end: int | None = None, drop_unrendered: bool = False
) -> Iterator[Document | Fault]:
    """Tokenize texts and conversations.

    train_on: of conversations; None is assistant, and allows texts too. end: the token after each text; None for no
    other than the tokenizer's. drop_unrendered: see tokenize_conversations. Raises DataError.
    """
    for kind, group in groupby(rows, key=lambda row: type(row.body)):
        same: Iterator[tuple[str, Any]] = group
        if kind is Fault:
            yield from (fault for _, fault in same)
        elif kind is Conversation:
            yield from tokenize_conversations(same, tokenizer, train_on or "assistant", drop_unrendered=drop_unrendered)
        elif train_on is None:
            if end == UNKNOWN_END:
                raise DataError(
                    f"The end of a text is unknown: the chat model's eos, {tokenizer.eos_token!r}, may end an answer. "
                    "Set end_token to the token that ended a text in pretraining, or to none."
                )
            for document in tokenize(same, tokenizer):
                if end is not None and document.ids[-1:] != end:
                    document = replace(document, ids=np.append(document.ids, end))
                yield document
        else:
            raise DataError(
                f"{next(same)[0]} is text; train_on: {train_on} needs conversations. Remove train_on, or set "
                "--text-column to their column."
            )


def last_seen_files(source: Source, folder: Path) -> tuple[DataFile, ...]:
    """The files of a source; of a Hub dataset that cannot be reached, those seen last, which `folder` keeps.

    Raises DataError.
    """
    if not source.is_on_hub:
        return source.files()
    name = digest(source.place, source.split, source.splits)
    path = folder / f"{name}.json"
    try:
        files = source.files()
    except UnreachableError:
        if not path.is_file():
            raise
        return tuple(DataFile(*pair) for pair in json.loads(path.read_text(encoding="utf-8")))
    with suppress(OSError):  # writing the tokens will report an unwritable cache
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(files), encoding="utf-8")
    return files


def source_identity(source: Source, files: Sequence[DataFile]) -> list[Any]:
    """Identity of a source as JSON: its files with sizes and times, or with the commit of a Hub dataset.

    Includes mtime and ctime, because cp -p, tar and rsync -t preserve mtime.
    """
    if source.is_demo:
        chooses = digest(Path(corpus.__file__).read_bytes())
        root = corpus.stdlib_root()
        return [source.place, chooses, sys.version, str(root), root.stat().st_mtime_ns]
    identity: list[Any] = []
    for file in files:
        if file.is_on_hub:
            identity.append(file.address)
        else:
            path = Path(file.address).resolve()
            status = path.stat()
            identity.append([str(path), file.kind, status.st_size, status.st_mtime_ns, status.st_ctime_ns])
    return identity


def tokenizer_digest(tokenizer) -> str:
    """sha256 over everything that determines how the tokenizer splits text and renders conversations."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else tokenizer.get_vocab()
    # these are arguments of the last call
    splitting = {key: value for key, value in backend.items() if key not in ("truncation", "padding")}
    # not part of the backend: whether special tokens in the text are split
    split = bool(getattr(tokenizer, "split_special_tokens", False))
    return digest(type(tokenizer).__name__, splitting, split, tokenizer.chat_template, tokenizer.special_tokens_map)
