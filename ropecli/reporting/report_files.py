"""Reads reports from JSON. Every value is validated before use."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ropecli.checkpoint.files import read_file
from ropecli.errors import DataError, first_fault, shown
from ropecli.evaluation.protocols import PROTOCOLS
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

    try:
        report: Report = TypeAdapter(Report).validate_python(value)
    except ValidationError as error:
        raise DataError(f"{where} is invalid: {first_fault(error, 'report')}.") from error
    if fault := next(_faults(report), None):
        raise DataError(f"{where} is invalid: {fault}.")
    return report


def _faults(report: Report) -> Iterator[str]:
    """What the types do not say: how the numbers of a report belong together."""
    tasks = {"perplexity": PROTOCOLS, "recall": ("recall",), "scores": ("needle", "ruler")}[report.kind]
    if report.task not in tasks:
        yield f"task {shown(report.task)} of kind {report.kind}; expected {', '.join(tasks)}"
    reference = [report.reference.absent, report.reference.near] if report.reference else []
    for cell in [*report.cells, *(part for whole in report.cells for part in whole.by_class), *reference]:
        where = f"{cell.task} at {cell.length} tokens"
        if len(cell.weights) != len(cell.sums) or not sum(cell.weights) > 0:
            yield f"{where} has {len(cell.sums)} sums; expected as many weights, not all 0"
        elif cell.passes and len(cell.passes) != len(cell.sums):
            yield f"{where} has {len(cell.sums)} sums; expected as many passes"
        elif report.kind == "scores" and any(
            not 0 <= hits <= n for hits, n in zip(cell.sums, cell.weights, strict=True)
        ):
            yield f"{where} has a score above 1 or below 0"
        if report.kind == "perplexity" and cell.low is not None and not 0 < cell.low <= (cell.high or 0):
            yield f"{where} has the interval {cell.low:g} to {cell.high}; expected positive numbers, the lower first"
    for length in report.lengths if report.kind == "recall" else ():
        if missing := {"absent", "far"} - {cell.task for cell in report.cells_at(length)}:
            yield f"recall at {length} tokens has no cell {sorted(missing)[0]!r}"
    if report.kind == "recall" and report.reference is None:
        yield "recall has no reference"
