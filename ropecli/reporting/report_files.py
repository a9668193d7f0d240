"""Reads reports from JSON. Every value is validated before use."""

import json
from collections.abc import Iterable, Iterator
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
        report: Report = TypeAdapter[Report](KINDS[task]).validate_python(value)
    except ValidationError as error:
        raise DataError(f"{where} is invalid: {first_fault(error, 'report')}.") from error
    if fault := next(_faults(report), None):
        raise DataError(f"{where} is invalid: {fault}.")
    return report


def _faults(report: Report) -> Iterator[str]:
    """What the types do not say: how the numbers of a report belong together."""
    reference = [report.reference.absent, report.reference.near] if report.reference else []
    for cell in [*report.cells, *(part for whole in report.cells for part in whole.by_class), *reference]:
        where = f"{cell.task} at {cell.length} tokens"
        if len(cell.weights) != len(cell.sums) or not sum(cell.weights) > 0:
            yield f"{where} has {len(cell.sums)} sums; expected as many weights, not all 0"
        elif cell.passes and len(cell.passes) != len(cell.sums):
            yield f"{where} has {len(cell.sums)} sums; expected as many passes"
    yield from report.faults()
