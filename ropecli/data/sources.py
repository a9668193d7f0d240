"""Reads documents from SOURCE: `demo`, `demo-train`, a file, a folder, a Hub dataset (owner/name, owner/name:config).

A document is a text; to train on, a row of a table may also be a conversation.

Files of unknown kinds are ignored in a folder and refused when given directly. Text and JSON lines may be compressed
(.txt.gz, .jsonl.zst). Documents are read one at a time, without a cache.
"""

import glob
import io
import logging
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ropecli.checkpoint.hub import BAD_TOKEN
from ropecli.checkpoint.opening import HUB_ID
from ropecli.data.conversations import Conversation, find_conversation
from ropecli.demo import corpus
from ropecli.errors import DataError, quoted, reason_of, shown

TEXT_COLUMN = "text"
DEMO = "demo"
DEMO_TRAIN = "demo-train"
TEXT_FILES = {".txt", ".md", ".py"}
TABLE_FILES = {".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow"}
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""fsspec's names. It reads zstd with Python 3.14, or with the package zstandard."""
_COMPRESSED = TEXT_FILES | {".jsonl"}
_KINDS = ", ".join(sorted(TEXT_FILES | set(TABLE_FILES)))
HUB_DOCUMENTS = 10_000
"""Documents to read of a Hub dataset, unless the user sets a number."""
_HUB_DATASET = re.compile(f"({HUB_ID.pattern})(?::(.+))?")
TO_MEASURE = ("test", "validation", "train")
TO_TRAIN = ("train",)

Texts = Iterator[tuple[str, str]]
Rows = Iterator[tuple[str, str | Conversation]]


class HubDataset(NamedTuple):
    """config: None for the default configuration."""

    name: str
    config: str | None


def read_texts(source: str, **options: Any) -> Texts:
    """(name, text) of each document of SOURCE. options: of read_rows. Raises DataError, also for conversations."""
    return map(_text_of, read_rows(source, **options))


def _text_of(row: tuple[str, str | Conversation]) -> tuple[str, str]:
    name, body = row
    if isinstance(body, Conversation):
        raise DataError(f"{name} is a conversation; expected text. Only `finetune --data` reads conversations.")
    return name, body


def read_rows(
    source: str,
    *,
    text_column: str = TEXT_COLUMN,
    split: str | None = None,
    splits: tuple[str, ...] = TO_MEASURE,
    whole: bool = False,
) -> Rows:
    """(name, text or conversation) of each document of SOURCE, in a fixed order.

    text_column: the column of tables with the text or the conversations; if the default column is missing, also
    `messages` or `conversations`. split: of a Hub dataset; default: the first of `splits` that it has. whole: read more
    than the first HUB_DOCUMENTS of a Hub dataset. Raises DataError.
    """
    place = source if source in (DEMO, DEMO_TRAIN) else locate(source)
    if isinstance(place, HubDataset):
        rows = _read_hub(place, text_column, (split,) if split else splits)
        return rows if whole else islice(rows, HUB_DOCUMENTS)
    if split:
        raise DataError(f"{source} is not a Hub dataset, so it has no split {shown(split)}. Remove the split.")
    if isinstance(place, str):
        return demo_held_out() if place == DEMO else corpus.training_files()
    return _read_folder(place, text_column) if place.is_dir() else _read_file(place, text_column)


def locate(source: str) -> Path | HubDataset:
    """The file, folder or Hub dataset that SOURCE names. Raises DataError."""
    try:
        path = Path(source).expanduser()
        if path.is_file() or (path.is_dir() and source):
            return path
        hub = _HUB_DATASET.fullmatch(source) if not path.parent.is_dir() else None
    except (OSError, RuntimeError, ValueError) as error:
        raise DataError(f"{source[:80]!r} is not a valid source: {error}"[:300]) from error
    if hub:
        return HubDataset(hub[1], hub[2])
    raise DataError(f"No file or folder {source}. Give a file, a folder, 'demo', 'demo-train' or a Hub dataset id.")


def is_hub_dataset(source: str) -> bool:
    try:
        return source not in (DEMO, DEMO_TRAIN) and isinstance(locate(source), HubDataset)
    except DataError:  # reading it will report the error
        return False


def files_of(folder: Path) -> list[Path]:
    """The files of a folder that can be read, sorted."""
    return sorted(path for path in folder.rglob("*") if _kind_of(path) and path.is_file())


def _kind_of(path: Path) -> str | None:
    """The suffix without that of a compression: .txt for story.txt.gz. None for an unknown file type."""
    packed = path.suffix in _COMPRESSIONS
    suffix = Path(path.stem).suffix if packed else path.suffix
    return suffix if suffix in (_COMPRESSED if packed else TEXT_FILES | set(TABLE_FILES)) else None


def demo_held_out() -> Texts:
    """The demo's held-out files, without those that overlap with the training text in this Python version."""
    for name, text in corpus.held_out_files().items():
        if not corpus.was_trained_on(text):
            yield name, text


def _read_folder(folder: Path, text_column: str) -> Rows:
    files = files_of(folder)
    if not files:
        raise DataError(f"{folder} contains no {_KINDS} files.")
    for path in files:
        for name, body in _read_file(path, text_column):
            yield f"{path.relative_to(folder).as_posix()}{name.removeprefix(path.name)}", body


def _read_file(path: Path, text_column: str) -> Rows:
    kind = _kind_of(path)
    if kind is None:
        raise DataError(f"{path} has an unknown file type; expected one of {_KINDS}, or text or .jsonl as .gz or .zst.")
    if kind in TEXT_FILES:
        try:
            yield path.name, _read_text(path)
        except (UnicodeDecodeError, OSError, EOFError, ValueError) as error:
            raise DataError(f"{path} cannot be read as UTF-8 text: {_reason(error)}") from error
        return
    if kind == ".jsonl" and path.stat().st_size == 0:
        return  # no rows; load_dataset would fail
    files = glob.escape(str(path))
    yield from _read_table(path.name, text_column, TABLE_FILES[kind], data_files=files, split="train")


def _read_text(path: Path) -> str:
    from fsspec.compression import compr
    from fsspec.core import get_compression

    compression = get_compression(path.name, _COMPRESSIONS.get(path.suffix))
    with path.open("rb") as file, io.TextIOWrapper(compr[compression](file, mode="rb"), encoding="utf-8") as text:
        return text.read()


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeEncodeError):
        return BAD_TOKEN
    if "zstd not supported" in str(error):  # fsspec
        return "it is compressed with zstd. Run `pip install zstandard`."
    return reason_of(error)


def _read_hub(dataset: HubDataset, text_column: str, splits: tuple[str, ...]) -> Rows:
    from datasets import get_dataset_split_names

    name, config = dataset
    try:
        available = get_dataset_split_names(name, config)
    except Exception as error:  # the Hub client raises many kinds
        _refuse_unknown_config(dataset)
        raise DataError(
            f"{name} is not a local file or folder, and it could not be loaded from the Hub: {_reason(error)}"
        ) from error
    chosen = next((split for split in splits if split in available), None)
    if chosen is None:
        raise DataError(f"{name} has no split {' or '.join(splits)}. Choose one of {', '.join(available)}.")
    return _read_table(name, text_column, name, name=config, split=chosen)


def _refuse_unknown_config(dataset: HubDataset) -> None:
    """Raise DataError with the configurations of a dataset that does not have this one."""
    from datasets import get_dataset_config_names

    name, config = dataset
    try:
        configs = get_dataset_config_names(name)
    except Exception:  # the caller has the original error
        return
    if config not in configs and len(configs) > 1:
        problem = f"has no configuration {config}" if config else "has several configurations"
        example = quoted("--data", f"{name}:{configs[0]}")
        raise DataError(f"{name} {problem}. Choose one of {', '.join(configs)}, such as {example}.")


def _read_table(label: str, text_column: str, builder: str, **arguments: str | None) -> Rows:
    from datasets import load_dataset

    # datasets would also log the errors that are raised below
    logger = logging.getLogger("datasets")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        for index, row in enumerate(load_dataset(builder, streaming=True, **arguments)):
            body = row.get(text_column)
            if not isinstance(body, str):
                body = find_conversation(row, text_column, TEXT_COLUMN)
            if body is None:
                columns = ", ".join(row) or "none"
                raise DataError(
                    f"{label}: row {index} has no text in column {text_column!r}. Available columns: {columns}."
                )
            yield f"{label}:{index}", body
    except DataError:
        raise
    except Exception as error:  # broken rows surface as many kinds from the readers below datasets
        raise DataError(f"{label} cannot be read as a table: {_reason(error)}") from error
    finally:
        logger.setLevel(level)
