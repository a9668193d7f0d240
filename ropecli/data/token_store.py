"""A source's tokens on disk: written once, then memory-mapped, so that no process loads them all.

The cache folder is $ROPECLI_CACHE, else $XDG_CACHE_HOME/ropecli, else ~/.cache/ropecli; if that cannot be written, one
in the temporary folder.

CACHE/tokens/KEY/lengths.bin      tokens of each document, int64
CACHE/tokens/KEY/ids.bin          tokens of all documents, int32
CACHE/tokens/KEY/trained.bin      whether to train on each token, one byte
CACHE/tokens/KEY/turns.bin        the first token of each turn of all conversations, int64
CACHE/tokens/KEY/turn_counts.bin  turns of each document, int64; 0 for a text
CACHE/tokens/KEY/digest           sha256 of the documents; a damaged store is detected by it and written again
CACHE/tokens/KEY/skipped          sentences about what was skipped or not used, a line each; empty for none

KEY is computed from the source and the tokenizer, without reading the text. The files of a source are tokenized in
shards of 64 MiB or one file, each under its own KEY, so that a failure or a change loses one of them.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from ropecli.atomic import new_folder
from ropecli.data.conversations import template_digest, tokenize_conversations
from ropecli.data.documents import Document, tokenize
from ropecli.data.files import DataFile, UnreachableError
from ropecli.data.formats import Conversation, Fault
from ropecli.data.sources import Rows, Source, describe_faults
from ropecli.demo import corpus
from ropecli.errors import DataError, OutputError, reason_of, shortened
from ropecli.hashing import digest
from ropecli.messages import warn

_FORMAT = 5
"""Version of the files and of how rows are read; part of every key, so that files of another version are not read."""
UNKNOWN_END = -1
"""The end of a text, if nobody knows it."""
_DIGEST, _SKIPPED = "digest", "skipped"
_PIECE = 1 << 20
_SHARD = 1 << 26
"""Bytes of text, compressed or not."""


class Chunks:
    """Arrays, one after the other, as one that is read by slices."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = [part for part in parts if len(part)]
        self._ends = np.cumsum([len(part) for part in self._parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._parts else 0

    def __getitem__(self, at: slice) -> np.ndarray:
        pieces, start = [], at.start
        while start < min(at.stop, len(self)):
            number = int(np.searchsorted(self._ends, start, side="right"))
            part = self._parts[number]
            first = int(self._ends[number]) - len(part)
            pieces.append(part[start - first : at.stop - first])
            start = first + len(part)
        return pieces[0] if len(pieces) == 1 else np.concatenate([*pieces, self._parts[0][:0]])


class TokenStore:
    """Tokenized documents by index. ids, trained: of all documents, one after the other; see Document.

    lengths: shape (documents,), int64. turn_counts: the same shape, int64, turns of each conversation; 0 for a text.
    masked: whether some tokens are not trained on. largest_id: -1 without tokens. digest: sha256 of all lengths, ids,
    what is trained on, and turns.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        ids: np.ndarray | Chunks,
        trained: np.ndarray | Chunks,
        turns: np.ndarray | None = None,
        turn_counts: np.ndarray | None = None,
    ) -> None:
        self.lengths, self.ids, self.trained = lengths, ids, trained
        self.turns = np.empty(0, np.int64) if turns is None else turns
        self.turn_counts = np.zeros(len(lengths), np.int64) if turn_counts is None else turn_counts
        self._first_turns = np.cumsum(self.turn_counts) - self.turn_counts
        self._starts = np.cumsum(lengths) - lengths
        self.masked, self.largest_id = False, -1
        pieces = []
        for start in range(0, len(ids), _PIECE):
            part, scored = ids[start : start + _PIECE], trained[start : start + _PIECE]
            self.masked |= not scored.all()
            self.largest_id = max(self.largest_id, int(part.max()))
            pieces.append(digest(np.where(scored, part, ~part).astype("<i4").tobytes()))
        self.digest = digest(lengths, pieces, self.turn_counts, self.turns)

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
        first = int(self._starts[document])
        part = slice(first + start, first + stop)
        return self.ids[part].astype(np.int64), self.trained[part].astype(bool)


def cache_folder() -> Path:
    if chosen := os.environ.get("ROPECLI_CACHE"):
        return Path(chosen).expanduser()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ropecli"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if os.access(folder, os.W_OK):
        return folder
    # a home folder that is read-only or missing, as in containers and jobs
    return Path(tempfile.gettempdir()) / f"ropecli-{os.getuid()}"


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
    settings += [tokenizer_digest(tokenizer), template_digest(tokenizer), end, drop_unrendered]

    said: set[str] = set()

    def shard(part: Sequence[DataFile]) -> TokenStore:
        faults, lost, unused = list[Fault](), list[str](), set[str]()

        def documents() -> Iterator[Document]:
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

        def skipped() -> str:
            sentences = [describe_faults(faults)] if faults else []
            if lost:
                conversations = f"{len(lost):,} conversation{'s'[: len(lost) > 1]}"
                sentences.append(f"The chat template leaves out parts of {conversations}. The first: {lost[0]}.")
            if unused:
                names = shortened(", ".join(sorted(unused)), 300)
                sentences.append(f"{source.place}: nothing reads {names}.")
            return "\n".join(sentences)

        return open_documents(digest([*settings, source_identity(source, part)]), documents, skipped, said)

    if source.is_demo or source.limit is not None:
        return shard(files)
    return joined([shard(part) for part in _shards(files)])


def _shards(files: Sequence[DataFile]) -> Iterator[list[DataFile]]:
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


def joined(stores: Sequence[TokenStore]) -> TokenStore:
    """The documents of all stores, in order."""
    if len(stores) == 1:
        return stores[0]
    return TokenStore(
        np.concatenate([store.lengths for store in stores] or [np.empty(0, dtype=np.int64)]),
        Chunks([store.ids for store in stores]),
        Chunks([store.trained for store in stores]),
        np.concatenate([store.turns for store in stores] or [np.empty(0, dtype=np.int64)]),
        np.concatenate([store.turn_counts for store in stores] or [np.empty(0, dtype=np.int64)]),
    )


def open_documents(
    key: str,
    documents: Callable[[], Iterator[Document]],
    skipped: Callable[[], str] = str,
    said: set[str] | None = None,
) -> TokenStore:
    """Open the store of this key; if it is missing or damaged, write it. Other processes wait. Raises OutputError.

    skipped: called after the documents; its lines are kept, and those that are not in `said` are said each time.
    """
    from filelock import FileLock

    cache = cache_folder() / "tokens"
    folder, said = cache / key, set() if said is None else said

    def tell(text: str) -> None:
        for line in [line for line in text.splitlines() if line not in said]:
            warn(line)
            said.add(line)

    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{key}.lock"):
            with suppress(OSError, ValueError):  # missing or damaged
                store = _map(folder)
                if store.digest == (folder / _DIGEST).read_text(encoding="utf-8"):
                    tell((folder / _SKIPPED).read_text(encoding="utf-8"))
                    return store
            shutil.rmtree(folder, ignore_errors=True)
            with new_folder(folder) as partial:
                _write(partial, documents())
                tell(text := skipped())
                (partial / _SKIPPED).write_text(text, encoding="utf-8")
                (partial / _DIGEST).write_text(_map(partial).digest, encoding="utf-8")
            return _map(folder)
    except (OSError, OutputError, NotImplementedError) as error:  # NotImplementedError: no locks on this file system
        raise OutputError(
            f"Cannot write tokens to the cache {cache}: {reason_of(error)}. Free some space, or set the environment "
            "variable ROPECLI_CACHE to a writable folder."
        ) from error


def _write(folder: Path, documents: Iterator[Document]) -> None:
    lengths, turns, counts = [], list[np.ndarray](), []
    with (folder / "ids.bin").open("wb") as ids, (folder / "trained.bin").open("wb") as trained:
        for document in documents:
            lengths.append(len(document.ids))
            counts.append(0 if document.turns is None else len(document.turns))
            turns += [] if document.turns is None else [document.turns]
            ids.write(document.ids.astype("<i4").data)
            scored = np.ones(len(document.ids), dtype=bool) if document.trained is None else document.trained
            trained.write(scored.data)
    (folder / "lengths.bin").write_bytes(np.array(lengths, dtype="<i8").data)
    if turns:
        (folder / "turns.bin").write_bytes(np.concatenate(turns).astype("<i8").data)
        (folder / "turn_counts.bin").write_bytes(np.array(counts, dtype="<i8").data)


def _map(folder: Path) -> TokenStore:
    """Raises OSError for missing files, ValueError for files of unequal lengths."""

    def array(name: str, dtype: str) -> np.ndarray:
        path = folder / name
        return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)

    further = [
        array(name, dtype) if (folder / name).exists() else None
        for name, dtype in (("turns.bin", "<i8"), ("turn_counts.bin", "<i8"))
    ]
    return TokenStore(array("lengths.bin", "<i8"), array("ids.bin", "<i4"), array("trained.bin", "?"), *further)


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
    """sha256 over everything that determines how the tokenizer splits text."""
    name = type(tokenizer).__name__
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        # these are arguments of the last call
        backend = {key: value for key, value in backend.items() if key not in ("truncation", "padding")}
        # not part of the backend: whether special tokens in the text are split
        split = bool(getattr(tokenizer, "split_special_tokens", False))
        return digest(name, backend, split)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = {path.relative_to(folder).as_posix(): path for path in Path(folder).rglob("*") if path.is_file()}
        return digest(name, *(part for file in sorted(files) for part in (file, files[file].read_bytes())))
