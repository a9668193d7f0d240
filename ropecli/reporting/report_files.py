"""Reads reports from JSON. The type of every value is checked."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from ropecli.checkpoint.files import read_file
from ropecli.errors import DataError, first_fault, shown
from ropecli.evaluation.kinds import KINDS
from ropecli.evaluation.report import SCHEMA_VERSION, Report


def read_reports(paths: Iterable[Path]) -> list[Report]:
    """Read the reports of all files, in order. Raises DataError, which names the file and what was expected."""
    return [report for path in paths for report in _read_file(path)]


def _read_file(path: Path) -> Iterator[Report]:
    from pydantic import TypeAdapter, ValidationError

    value = read_file(path, json.loads)
    value = value if isinstance(value, dict) else {}
    reports, version = value.get("reports"), value.get("schema_version")
    if version != SCHEMA_VERSION or not isinstance(reports, list) or not reports:
        raise DataError(
            f"{path} has no reports of this version of ropecli: its schema_version is {shown(version)}. Measure again, "
            "with `ropecli eval-ppl --output FILE`, `compare`, `needle` or `ruler`."
        )
    for number, report in enumerate(reports, 1):
        task = report.get("task") if isinstance(report, dict) else None
        if not isinstance(task, str) or task not in KINDS:
            raise DataError(f"{path}, report {number} is invalid: task {shown(task)}; expected {', '.join(KINDS)}.")
        try:
            yield TypeAdapter[Report](KINDS[task]).validate_python(report)
        except ValidationError as error:
            raise DataError(f"{path}, report {number} is invalid: {first_fault(error, 'report')}.") from error
