"""Checks output paths. A command overwrites an earlier output of the same kind, and no other file."""

import json
import os
from pathlib import Path

from ropecli.atomic import refuse_unwritable
from ropecli.errors import OutputError

_REPORTS = ("perplexity", "retrieval", "ruler")
_LARGEST_REPORT = 256 * 2**20
_BEGINNINGS = {
    ".png": b"\x89png",
    ".pdf": b"%pdf",
    ".svg": b"<?xml",
    ".html": b"<!doctype html",
    ".htm": b"<!doctype html",
}
"""First bytes of drawn files by ending, in lower case."""


def refuse_outputs(report: Path | None = None, drawn: Path | None = None) -> None:
    """Raises OutputError for outputs that cannot be written, are the same file, or exist as another kind of file.

    report: a JSON file. drawn: a picture or a page, with a known ending.
    """
    refuse_unwritable(report)
    refuse_unwritable(drawn)
    if report and drawn and os.path.realpath(report) == os.path.realpath(drawn):
        raise OutputError(f"{report} is both the report and the plot. Give one of them another name.")
    for path, is_earlier, kind in ((report, _holds_reports, "report"), (drawn, _is_drawn, "plot or page")):
        if path and path.exists() and not (path.is_file() and is_earlier(path)):
            raise OutputError(
                f"{path} exists and is not a {kind} of ropecli, so it is not overwritten. Give another name."
            )


def _holds_reports(path: Path) -> bool:
    """Whether the file is empty or holds evaluation reports. (A tune.json belongs to its checkpoint.)"""
    try:
        if path.stat().st_size > _LARGEST_REPORT:
            return False
        text = path.read_bytes()
        value = json.loads(text) if text else []
    except (OSError, ValueError, RecursionError):
        return False
    reports = value if isinstance(value, list) else [value]
    return all(isinstance(one, dict) and one.get("kind") in _REPORTS for one in reports)


def _is_drawn(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            start = file.read(100).lstrip().lower()
    except OSError:
        return False
    return not start or start.startswith(_BEGINNINGS[path.suffix.lower()])
