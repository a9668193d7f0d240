"""Reads rows strictly: a needed value is given as the file has it, or its row is named.

JSON lines, a JSON array, CSV, Parquet and Arrow. No value takes the type of others, and columns that are not needed
cannot stop a reading. Memory is bounded by a row, of Parquet and Arrow by a batch of rows; a JSON array is read whole.
"""

import codecs
import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO

from ropecli.data.formats import Conversation, Fault, body_of, columns_of, has_body
from ropecli.errors import DataError, shown

JSON_LINES, JSON, CSV, TSV, PARQUET, ARROW = ".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow"
TABLES = (JSON_LINES, JSON, CSV, TSV, PARQUET, ARROW)
_ROWS = 64
"""Rows of Parquet and Arrow at a time."""
_PIECE = 1 << 20
_LONGEST_FIELD = 2**31 - 1
_DAMAGES = (OSError, EOFError, ValueError, NotImplementedError, OverflowError, KeyError, RecursionError)
"""What the libraries raise for a damaged file."""

_Values = tuple[int, Any, Sequence[str]]
"""Number of the line or row, from 1; its values, of needed columns at least, or its fault; the names of all columns."""


def read_bodies(
    kind: str, file: BinaryIO, name: str, text_column: str
) -> Iterator[tuple[int, str | Conversation | Fault]]:
    """(number of the line or row, text, conversation or fault) of each row of a table.

    text_column: if it is the default, the other formats of formats.py are read too. Faults: a needed value of another
    type, a number that is not finite, text that cannot be written as UTF-8. Raises DataError for a damaged file.
    """
    place = "line" if kind in (JSON_LINES, CSV, TSV) else "row"
    number = 0
    try:
        for number, values, columns in _rows(kind, file, columns_of(text_column)):
            try:
                body: str | Conversation | Fault = _body(values, text_column, columns)
            except DataError as error:
                body = Fault(f"{name}, {place} {number}: {error}")
            yield number, body
    except (*_DAMAGES, csv.Error) as error:
        raise DataError(f"{name} cannot be read as a table after {place} {number}: {error}") from error


def has_texts(kind: str, file: BinaryIO, text_column: str) -> bool:
    """Whether the first row has the column of texts or conversations; true without rows. Raises OSError, ValueError."""
    _, values, columns = next(iter(_rows(kind, file, columns_of(text_column))), (0, None, (text_column,)))
    return has_body(columns, text_column) and not isinstance(values, DataError)


def _body(values: Any, text_column: str, columns: Sequence[str]) -> str | Conversation:
    if isinstance(values, DataError):
        raise values
    if not isinstance(values, dict):
        raise DataError(f"{shown(values)} is not an object with columns.")
    body = body_of(values, text_column, columns)
    for name, value in {text_column: body}.items() if isinstance(body, str) else vars(body).items():
        try:
            (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)).encode()
        except (TypeError, ValueError) as error:  # half a surrogate pair, NaN, a date
            raise DataError(f"{name} cannot be written as JSON in UTF-8: {error}") from error
    return body


def _rows(kind: str, file: BinaryIO, columns: Sequence[str]) -> Iterator[_Values]:
    if kind in (JSON_LINES, JSON):
        file = io.BufferedReader(file) if not hasattr(file, "peek") else file  # type: ignore[type-var,assignment]
        is_array = file.peek(_PIECE).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")  # type: ignore[attr-defined]
        rows: Iterator[tuple[int, Any]] = _lines(file)
        if kind == JSON and is_array:
            rows = enumerate(json.loads(file.read().decode("utf-8-sig")), 1)
        return ((number, row, list(row) if isinstance(row, dict) else ()) for number, row in rows)
    if kind in (CSV, TSV):
        return _csv(file, "," if kind == CSV else "\t")
    return _columns(_parquet(file, columns) if kind == PARQUET else _arrow(file, columns))


def _lines(file: BinaryIO) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(file, 1):
        text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if not text.strip():
            continue
        try:
            yield number, json.loads(text.decode())
        except (ValueError, RecursionError) as error:
            yield number, DataError(f"not JSON: {error}. Expected an object per line.")


def _csv(file: BinaryIO, delimiter: str) -> Iterator[_Values]:
    csv.field_size_limit(_LONGEST_FIELD)
    reader = csv.DictReader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""), delimiter=delimiter, strict=True)
    for row in reader:
        fault = DataError("more values than the header has columns.") if None in row else None
        yield reader.line_num, fault or row, reader.fieldnames or ()


def _columns(batches: Iterable[Any]) -> Iterator[_Values]:
    """The rows of record batches, each with the names of all columns of the table."""
    number = 0
    for batch, names in batches:
        for start in range(0, batch.num_rows, _ROWS):
            for row in batch.slice(start, _ROWS).to_pylist():
                number += 1
                yield number, {name: _without_null(value) for name, value in row.items()}, names


def _without_null(value: Any) -> Any:
    """Without the keys of objects that a column has in other rows only."""
    if isinstance(value, dict):
        return {key: _without_null(part) for key, part in value.items() if part is not None}
    return [_without_null(part) for part in value] if isinstance(value, list) else value


def _parquet(file: BinaryIO, columns: Sequence[str]) -> Iterator[tuple[Any, list[str]]]:
    from pyarrow.parquet import ParquetFile

    table = ParquetFile(file, page_checksum_verification=True, pre_buffer=False)
    names = table.schema_arrow.names
    for batch in table.iter_batches(_ROWS, columns=[name for name in columns if name in names] or names[:1]):
        yield batch, names


def _arrow(file: BinaryIO, columns: Sequence[str]) -> Iterator[tuple[Any, list[str]]]:
    from pyarrow import ipc

    magic = file.read(6)
    file.seek(0)
    if magic == b"ARROW1":
        table = ipc.open_file(file)
        batches: Iterable[Any] = (table.get_batch(index) for index in range(table.num_record_batches))
    else:
        batches = table = ipc.open_stream(file)
    names = table.schema.names
    for batch in batches:
        batch.validate(full=True)  # damaged offsets would crash the process
        yield batch.select([name for name in columns if name in names] or names[:1]), names
    if magic != b"ARROW1" and file.read(1):
        raise ValueError("the stream ends before the file does")
