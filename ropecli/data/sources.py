"""Reads documents from SOURCE: `demo`, `demo-train`, a file, a folder, a Hub dataset (owner/name, owner/name:config).

A document is a text; to train on, a row of a table may also be a conversation. Text, JSON and CSV may be compressed
(.txt.gz, .jsonl.zst). Files of unknown kinds are named in a folder and refused when given directly. Documents are read
one at a time, without a cache.
"""

import codecs
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, starmap

from ropecli.data.files import (
    KINDS,
    TEXT_FILES,
    DataFile,
    files_of_folder,
    splits_of_folder,
    splits_on_hub,
)
from ropecli.data.formats import TEXT_COLUMN, Conversation, Fault, Row
from ropecli.data.tables import read_bodies
from ropecli.demo import corpus
from ropecli.errors import DataError, reason_of, shown
from ropecli.messages import say, warn
from ropecli.names import DEMO, DEMO_TRAIN, HubDataset, locate

HUB_DOCUMENTS = 10_000
"""Documents to read of a Hub dataset, unless the user sets a number."""
TO_MEASURE = ("test", "validation", "train")
TO_TRAIN = ("train",)
Texts = Iterator[tuple[str, str]]
Rows = Iterator[Row]


@dataclass(frozen=True)
class Source:
    """A place of documents, and the choice of those to read.

    place: `demo`, `demo-train`, a file, a folder, or a Hub dataset (owner/name, owner/name:config). column: of tables,
    with the texts or the conversations; if the default is missing, also `messages` or `conversations`. split: default:
    the first of `splits` that the place has. limit: rows to read, also faulty ones; None for all. skip_faulty: skip and
    count rows without a text that can be used, which are refused otherwise. Raises DataError in every method.
    """

    place: str
    column: str = TEXT_COLUMN
    split: str | None = None
    splits: tuple[str, ...] = TO_MEASURE
    limit: int | None = None
    skip_faulty: bool = False

    @property
    def is_demo(self) -> bool:
        return self.place in (DEMO, DEMO_TRAIN)

    @property
    def is_on_hub(self) -> bool:
        return not self.is_demo and isinstance(locate(self.place), HubDataset)

    def limited(self, option: str = "") -> "Source":
        """Read no more than the first HUB_DOCUMENTS of a Hub dataset without a limit, and say so.

        option: sets the limit; empty for none.
        """
        if self.limit is not None or not self.is_on_hub:
            return self
        more = f" To read more, set {option}." if option else ""
        say(f"Reading at most {HUB_DOCUMENTS:,} documents of {self.place}.{more}")
        return replace(self, limit=HUB_DOCUMENTS)

    def texts(self) -> Texts:
        """(name, text) of each document, in a fixed order. Says at the end which rows were skipped."""
        faults: list[Fault] = []
        try:
            for name, body in self.rows():
                if isinstance(body, Conversation):
                    raise DataError(
                        f"{name} is a conversation; expected text. Only `finetune --data` reads conversations."
                    )
                if isinstance(body, Fault):
                    faults.append(body)
                else:
                    yield name, body
        finally:
            if faults:
                warn(describe_faults(faults))

    def rows(self, files: Sequence[DataFile] | None = None) -> Rows:
        """The rows in a fixed order. Raises the fault of one, unless skip_faulty. files: default: all of them."""
        if self.is_demo:
            rows: Rows = starmap(Row, demo_held_out() if self.place == DEMO else corpus.training_files())
        else:
            files = self.files() if files is None else files
            rows = (row for file in files for row in _read_file(file, self.column))
        for row in islice(rows, self.limit):
            if isinstance(row.body, Fault) and not self.skip_faulty:
                raise DataError(row.body.message)
            yield row

    def files(self) -> tuple[DataFile, ...]:
        """The files, in order; none of the demo. Says what is read of several splits, and not read of a folder."""
        place = None if self.is_demo else locate(self.place)
        if isinstance(place, HubDataset):
            files = self._of_split(splits_on_hub(place))
        elif place and place.is_dir() and (by_split := splits_of_folder(place)):
            files = self._of_split(by_split)
        elif self.split:
            raise DataError(f"{self.place} has no splits. Remove the split {shown(self.split)}.")
        elif place and place.is_file():
            files = (DataFile(place.name, str(place)),)
        else:
            files = files_of_folder(place, self.column) if place else ()
        if unknown := [file.name for file in files if not file.kind]:
            raise DataError(
                f"{self.place}: {unknown[0]} has an unknown file type; expected one of {KINDS}, or text, JSON or CSV "
                "as .gz or .zst."
            )
        return files

    def _of_split(self, by_split: dict[str, list[DataFile]]) -> tuple[DataFile, ...]:
        names = (self.split,) if self.split else self.splits
        chosen = next((name for name in names if name in by_split), None)
        other_splits = ", ".join(name for name in by_split if name != chosen)
        if chosen is None:
            raise DataError(f"{self.place} has no split {' or '.join(names)}. Choose one of {other_splits}.")
        if other_splits and not self.split:
            say(f"Reading the split {chosen} of {self.place}; it also has {other_splits}. Choose another with --split.")
        return tuple(by_split[chosen])


def demo_held_out() -> Texts:
    """The demo's held-out files, without those that overlap with the training text in this Python version."""
    for name, text in corpus.held_out_files().items():
        if not corpus.was_trained_on(text):
            yield name, text


def describe_faults(faults: Sequence[Fault]) -> str:
    return f"Skipping {len(faults)} faulty row{'s'[: len(faults) > 1]}. The first: {faults[0].message}"


def _read_file(file: DataFile, text_column: str) -> Rows:
    try:
        with file.open() as content:
            if file.kind in TEXT_FILES:
                text = content.read().removeprefix(codecs.BOM_UTF8).decode()
                yield Row(file.name, io.IncrementalNewlineDecoder(None, translate=True).decode(text, final=True))
                return
            for number, body in read_bodies(file.kind, content, file.name, text_column):
                yield Row(f"{file.name}:{number}", body)
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"{file.name} cannot be read: {reason_of(error)}") from error
