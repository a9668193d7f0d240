"""Reads reports from JSON. The type of every value is checked."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ropecli.checkpoint.files import read_file
from ropecli.errors import DataError, first_fault, shown
from ropecli.evaluation.kinds import KINDS
from ropecli.evaluation.report import SCHEMA_VERSION, Report


def read_reports(paths: Iterable[Path]) -> list[Report]:
    """Read the reports of all files, in order. Raises DataError, which names the file and what was expected."""
    return [report for path in paths for report in _read_file(path)]


def _read_file(path: Path) -> list[Report]:
    value = read_file(path, json.loads)
    value = value if isinstance(value, dict) else {}
    reports, version = value.get("reports"), value.get("schema_version")
    if version != SCHEMA_VERSION or not isinstance(reports, list) or not reports:
        raise DataError(
            f"{path} has no reports of this version of ropecli: its schema_version is {shown(version)}. Measure again, "
            "with `ropecli eval-ppl --output FILE`, `compare`, `needle` or `ruler`."
        )
    return [_read_one(f"{path}, report {index}", report) for index, report in enumerate(reports, 1)]


def _read_one(where: str, value: Any) -> Report:
    """where: names the file and the report in it, for messages."""
    from pydantic import TypeAdapter, ValidationError

    task = value.get("task") if isinstance(value, dict) else None
    if not isinstance(task, str) or task not in KINDS:
        raise DataError(f"{where} is invalid: task {shown(task)}; expected {', '.join(KINDS)}.")
    try:
        return TypeAdapter[Report](KINDS[task]).validate_python(value)
    except ValidationError as error:
        raise DataError(f"{where} is invalid: {first_fault(error, 'report')}.") from error
