"""Finds the files of a source: of a folder, and of the splits that a folder or a Hub dataset has.

A folder with tables has splits by its README's metadata or its file names, which datasets resolves, or because
save_to_disk wrote it.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ropecli.checkpoint.files import read_file
from ropecli.checkpoint.hub import PATIENCE
from ropecli.data.tables import ARROW, CSV, JSON, JSON_LINES, PARQUET, TABLES, TSV, has_texts
from ropecli.errors import DataError, reason_of, shortened
from ropecli.messages import say
from ropecli.names import HubDataset

TEXT_FILES = (".txt", ".md", ".py")
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
KINDS = ", ".join((*TEXT_FILES, *TABLES))
_CARD = "readme.md"
"""Describes the tables beside it; no document."""
_DATASET_DICT, _DATASET_STATE = "dataset_dict.json", "state.json"
"""Files of datasets' save_to_disk."""
_MANY_TEXTS = 10
"""Texts per table: a folder of texts with some tables, as source code has for its tests."""
_LFS = b"version https://git-lfs"


class UnreachableError(DataError):
    """A dataset could not be loaded from the Hub."""


class DataFile(NamedTuple):
    """A file to read. name: for documents and messages. address: a path, or a file on the Hub with its commit."""

    name: str
    address: str

    @property
    def kind(self) -> str:
        return kind_of(self.name) or ""

    @property
    def is_on_hub(self) -> bool:
        return self.address.startswith("hf://")

    def open(self) -> BinaryIO:
        """Raises DataError, OSError. A compressed file that ends early raises it too, while it is read."""
        if self.is_on_hub:
            from huggingface_hub import HfFileSystem

            file: Any = HfFileSystem().open(self.address, "rb")
        else:
            file = Path(self.address).open("rb")  # noqa: SIM115
            start = file.read(len(_LFS))
            if start == _LFS:
                raise DataError(f"{self.name} is a pointer of Git LFS, without the content. Run `git lfs pull`.")
            file.seek(0)
        if compression := _COMPRESSIONS.get(Path(self.name).suffix.lower()):
            import pyarrow

            file = pyarrow.CompressedInputStream(pyarrow.PythonFile(file), compression)
        return file


def kind_of(name: str) -> str | None:
    """The suffix without that of a compression, in small letters: .txt for story.TXT.gz. None for an unknown type."""
    path = Path(name.lower())
    packed = path.suffix in _COMPRESSIONS
    kind = (Path(path.stem).suffix if packed else path.suffix).replace(".ndjson", JSON_LINES)
    return kind if kind in (*TEXT_FILES, *TABLES) and not (packed and kind in (PARQUET, ARROW)) else None


def files_of_folder(folder: Path, text_column: str) -> tuple[DataFile, ...]:
    """All files with documents in a folder without splits, sorted. Says which others it has."""
    paths = sorted(_visible_files(folder))
    files = [DataFile(path.relative_to(folder).as_posix(), str(path)) for path in paths if kind_of(path.name)]
    described = {folder for file in files if file.kind in TABLES for folder in Path(file.address).parents}
    cards = {path for path in paths if path.name.lower() == _CARD and path.parent in described}
    files = [file for file in files if Path(file.address) not in cards]
    # .json and .csv hold settings and figures as well as documents
    unsure = [file for file in files if file.kind in (JSON, CSV, TSV) and not _has_texts(file, text_column)]
    if not files:
        raise DataError(f"{folder} contains no {KINDS} files.")
    read = files if len(unsure) == len(files) else [file for file in files if file not in unsure]
    _say_unread(folder, paths, read)
    return tuple(read)


def _has_texts(file: DataFile, text_column: str) -> bool:
    try:
        with file.open() as content:
            return has_texts(file.kind, content, text_column)
    except (OSError, ValueError, RecursionError):  # reading it will report the error
        return True


def _visible_files(folder: Path) -> Iterator[Path]:
    """Without those of .git, .ipynb_checkpoints, __MACOSX and the like, as datasets does."""
    for path in folder.rglob("*"):
        *folders, name = path.relative_to(folder).parts
        if path.is_symlink() and not path.exists() and kind_of(name) in TABLES:
            raise DataError(f"{path} is a link to a missing file. Download it, or remove the link.")
        if path.is_file() and not name.startswith(".") and not any(part.startswith((".", "__")) for part in folders):
            yield path


def _say_unread(folder: Path, paths: Sequence[Path], files: Sequence[DataFile]) -> None:
    """paths: all files of the folder. files: those that may be read."""
    read = {Path(file.address) for file in files}
    if unread := [path.relative_to(folder).as_posix() for path in paths if path not in read]:
        say(f"Not read in {folder}, {len(unread):,}: {shortened(', '.join(unread), 300)}.")


def splits_of_folder(folder: Path) -> dict[str, list[DataFile]]:
    """The files of each split of a folder with tables; empty if it has none."""
    if (folder / _DATASET_DICT).is_file():
        return {name: _saved_files(folder, folder / name) for name in _saved(folder / _DATASET_DICT, "splits")}
    if (folder / _DATASET_STATE).is_file() and any(folder.glob("*.arrow")):
        return {"train": _saved_files(folder, folder)}
    paths = sorted(_visible_files(folder.resolve()))
    kinds = [kind_of(path.name) for path in paths]
    tables, texts = (sum(kind in known for kind in kinds) for known in (TABLES, TEXT_FILES))
    if not tables:
        return {}

    from datasets.data_files import DEFAULT_PATTERNS_ALL, get_data_patterns

    card = next((path for path in folder.iterdir() if path.name.lower() == _CARD), None)
    try:
        configured = card is not None and bool(
            re.search(r"^\W*data_(files|dir):", card.read_text("utf-8", "replace"), re.M)
        )
        # a folder of source code has folders named test, and tables in them
        if not configured and (texts > _MANY_TEXTS * tables or get_data_patterns(str(folder)) == DEFAULT_PATTERNS_ALL):
            return {}
        splits = _resolved(str(folder.resolve()), str(folder), None, None)
        # the name of one file among others is no split
        alone = sum(map(len, splits.values())) == tables and texts == bool(card)
        if not configured and len(splits) == 1 and not alone:
            return {}
        _say_unread(folder.resolve(), paths, [file for files in splits.values() for file in files])
        return splits
    except Exception as error:  # of the card, or of files that datasets cannot tell apart
        raise DataError(f"datasets cannot find the splits of {folder}: {reason_of(error)} Give a file.") from error


def _saved_files(root: Path, folder: Path) -> list[DataFile]:
    """The files of a dataset written by save_to_disk."""
    paths = [folder / entry["filename"] for entry in _saved(folder / _DATASET_STATE, "_data_files")]
    return [DataFile(path.relative_to(root).as_posix(), str(path)) for path in paths]


def _saved(path: Path, key: str) -> Any:
    return read_file(path, json.loads)[key]


def splits_on_hub(dataset: HubDataset) -> dict[str, list[DataFile]]:
    from huggingface_hub import HfApi

    name, config = dataset
    try:
        commit = HfApi().dataset_info(name, timeout=PATIENCE).sha
        return _resolved(name, name, config, commit)
    except ValueError as error:  # no such configuration: two lines, with those that there are
        listed = " ".join(str(error).splitlines()[:2])
        raise DataError(f"{name}: {listed} Name one after a colon, --data {name}:CONFIG.") from error
    except Exception as error:  # the Hub client raises many kinds
        raise UnreachableError(
            f"{name} is not a local file or folder, and it could not be loaded from the Hub: {reason_of(error)}"
        ) from error


def _resolved(place: str, root: str, config: str | None, commit: str | None) -> dict[str, list[DataFile]]:
    """The files of each split, as datasets resolves them by metadata and names."""
    from datasets import load_dataset_builder

    files = load_dataset_builder(place, config, revision=commit).config.data_files or {}
    prefix = re.compile(rf"^(hf://datasets/[^@]+@[^/]+|{re.escape(Path(root).resolve().as_posix())})/")
    return {
        str(split): [DataFile(prefix.sub("", str(address)), str(address)) for address in addresses]
        for split, addresses in files.items()
    }
