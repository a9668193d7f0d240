"""Reads texts from SOURCE: `demo`, `demo-train`, a file, a folder, or a Hub dataset.

Files of unknown kinds are ignored in a folder and refused when given directly. Texts are read one at a time, without a
cache.
"""

import glob
import logging
from collections.abc import Iterator
from pathlib import Path

from ropecli.checkpoint.opening import HUB_ID
from ropecli.demo import corpus
from ropecli.errors import DataError, reason_of

DEMO = "demo"
DEMO_TRAIN = "demo-train"
TEXT_FILES = {".txt", ".md", ".py"}
TABLE_FILES = {".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow"}
_KINDS = ", ".join(sorted(TEXT_FILES | set(TABLE_FILES)))
TO_MEASURE = ("test", "validation", "train")
TO_TRAIN = ("train",)

Texts = Iterator[tuple[str, str]]


def read_texts(
    source: str, *, text_column: str = "text", split: str | None = None, splits: tuple[str, ...] = TO_MEASURE
) -> Texts:
    """(name, text) of each document of SOURCE, in a fixed order.

    text_column: the column of tables with the text. split: of a Hub dataset; default: the first of `splits` that it
    has. Raises DataError.
    """
    if source == DEMO:
        return demo_held_out()
    if source == DEMO_TRAIN:
        return corpus.training_files()
    try:
        path = Path(source).expanduser()
        if path.is_file():
            return _read_file(path, text_column)
        if path.is_dir() and source:
            return _read_folder(path, text_column)
        is_hub_id = HUB_ID.fullmatch(source) and not path.parent.is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        raise DataError(f"{source[:80]!r} is not a valid source: {error}"[:300]) from error
    if is_hub_id:
        return _read_hub(source, text_column, (split,) if split else splits)
    raise DataError(f"No file or folder {source}. Give a file, a folder, 'demo', 'demo-train' or a Hub dataset id.")


def demo_held_out() -> Texts:
    """The demo's held-out files, without those that overlap with the training text in this Python version."""
    for name, text in corpus.held_out_files().items():
        if not corpus.was_trained_on(text):
            yield name, text


def _read_folder(folder: Path, text_column: str) -> Texts:
    files = sorted(
        path for path in folder.rglob("*") if path.suffix in TEXT_FILES | set(TABLE_FILES) and path.is_file()
    )
    if not files:
        raise DataError(f"{folder} contains no {_KINDS} files.")
    for path in files:
        for name, text in _read_file(path, text_column):
            yield f"{path.relative_to(folder).as_posix()}{name.removeprefix(path.name)}", text


def _read_file(path: Path, text_column: str) -> Texts:
    if path.suffix in TEXT_FILES:
        try:
            yield path.name, path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError) as error:
            raise DataError(f"{path} cannot be read as UTF-8 text: {error}") from error
    elif path.suffix in TABLE_FILES:
        if path.suffix == ".jsonl" and path.stat().st_size == 0:
            return  # no rows; load_dataset would fail
        files = glob.escape(str(path))
        yield from _read_table(path.name, text_column, TABLE_FILES[path.suffix], data_files=files, split="train")
    else:
        raise DataError(f"{path} has an unknown file type; expected one of {_KINDS}.")


def _read_hub(source: str, text_column: str, wanted: tuple[str, ...]) -> Texts:
    from datasets import get_dataset_split_names

    try:
        available = get_dataset_split_names(source)
    except Exception as error:  # the Hub client raises many kinds
        raise DataError(
            f"{source} is not a local file or folder, and it could not be loaded from the Hub: {reason_of(error)}"
        ) from error
    chosen = next((name for name in wanted if name in available), None)
    if chosen is None:
        raise DataError(f"{source} has no split {' or '.join(wanted)}. Choose one of {', '.join(available)}.")
    return _read_table(source, text_column, source, split=chosen)


def _read_table(label: str, text_column: str, builder: str, **arguments: str) -> Texts:
    from datasets import load_dataset

    # datasets would also log the errors that are raised below
    logger = logging.getLogger("datasets")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        for index, row in enumerate(load_dataset(builder, streaming=True, **arguments)):
            if not isinstance(row.get(text_column), str):
                columns = ", ".join(row) or "none"
                raise DataError(
                    f"{label}: row {index} has no text in column {text_column!r}. Available columns: {columns}."
                )
            yield f"{label}:{index}", row[text_column]
    except DataError:
        raise
    except Exception as error:  # broken rows surface as many kinds from the readers below datasets
        raise DataError(f"{label} cannot be read as a table: {reason_of(error)}") from error
    finally:
        logger.setLevel(level)
