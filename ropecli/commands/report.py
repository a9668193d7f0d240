"""`ropecli report`: writes an HTML page of reports."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_doc import Doc

from ropecli.atomic import as_path, new_file, refuse_unwritable
from ropecli.options import OUTPUT, Overwrite
from ropecli.signature import Flag, command


@dataclass(frozen=True)
class Page:
    path: Path

    def as_json(self) -> dict[str, Any]:
        return {"page": str(self.path)}


@command
def report(
    reports: Annotated[
        Sequence[str | Path],
        Flag("reports", metavar="REPORT"),
        Doc("Reports written with --output."),
    ],
    *,
    output: Annotated[
        str | Path | None,
        Flag("--output", "-o", metavar="FILE"),
        Doc("HTML page to write. Default: beside the first report, with the ending .html."),
        OUTPUT,
    ] = None,
    overwrite: Overwrite = False,
) -> Page:
    """Write a self-contained HTML page of reports: headline numbers, tables, plots, and how they were measured."""
    from ropecli.reporting.page import render_page
    from ropecli.reporting.report_files import read_reports

    measured = read_reports([as_path(path) for path in reports])
    page = as_path(reports[0]).with_suffix(".html") if output is None else as_path(output)
    refuse_unwritable(page, overwrite=overwrite)
    text = render_page(measured)
    with new_file(page) as partial:
        partial.write_text(text, encoding="utf-8")
    return Page(page)
