"""Checks output paths. A command overwrites an earlier output of the same kind, and no other file."""

import json
import os
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

from ropecli.atomic import refuse_unwritable
from ropecli.errors import OutputError

_REPORTS = ("perplexity", "retrieval", "ruler")
_LARGEST = 256 * 2**20
_MARKS = {
    ".png": b"Software\0ropecli ",
    ".pdf": b"/Creator (ropecli ",
    ".svg": b"<dc:title>ropecli ",
    ".html": b'<meta name="generator" content="ropecli ',
    ".htm": b'<meta name="generator" content="ropecli ',
}
"""The bytes with which a drawn file names the program that wrote it, by ending."""


def refuse_outputs(
    report: Path | None = None, drawn: Path | None = None, keys: Path | None = None, card: Path | None = None
) -> None:
    """Raises OutputError for outputs that cannot be written, exclude each other, or exist as another kind of file.

    report: a JSON file. drawn: a picture or a page, with a known ending. keys: a file that is read if it exists. card:
    a model card, which is not written through a link, since the user did not choose its name.
    """
    outputs = [path for path in (report, drawn, card, keys) if path and not (path is keys and path.exists())]
    for output in outputs:
        refuse_unwritable(output)
    for first, second in permutations(outputs, 2):
        if Path(os.path.realpath(second)).is_relative_to(os.path.realpath(first)):
            raise OutputError(f"{first} and {second} cannot both be written. Give one of them another name.")
    kinds = (report, _holds_reports, "report"), (drawn, _is_drawn, "plot or page"), (card, _is_card, "model card")
    for path, is_earlier, kind in kinds:
        exists = path and (path.exists() or (path == card and path.is_symlink()))
        if path and exists and not _is_ours(path, is_earlier):
            raise OutputError(
                f"{path} exists and is not a {kind} of ropecli, so it is not overwritten. Give another name, or delete "
                "it if an earlier release wrote it."
            )


def _is_ours(path: Path, is_earlier: Callable[[Path, bytes], bool]) -> bool:
    """Whether the file is empty or an earlier output."""
    try:
        size = path.stat().st_size if path.is_file() else _LARGEST + 1
        return size == 0 or (size <= _LARGEST and is_earlier(path, path.read_bytes()))
    except OSError:
        return False


def _holds_reports(path: Path, content: bytes) -> bool:
    """Whether all values are evaluation reports. (A tune.json belongs to its checkpoint.)"""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return False
    reports = value if isinstance(value, list) else [value]
    return bool(reports) and all(map(_is_report, reports))


def _is_report(value: Any) -> bool:
    return isinstance(value, dict) and value.get("kind") in _REPORTS and {"schema_version", "digest"} <= value.keys()


def _is_drawn(path: Path, content: bytes) -> bool:
    return _MARKS[path.suffix.lower()] in content


def _is_card(path: Path, content: bytes) -> bool:
    from ropecli.checkpoint.card import without_section

    return not path.is_symlink() and without_section(content) != content
