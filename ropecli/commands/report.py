"""`ropecli report`: one page that holds everything reports say."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_doc import Doc

from ropecli.commands.options import Flag, as_path, listed
from ropecli.commands.outputs import refuse_outputs
from ropecli.errors import OutputError


@dataclass(frozen=True)
class DrawnFile:
    """kind: page or plot."""

    kind: str
    path: Path

    def as_json(self) -> dict[str, Any]:
        return {self.kind: str(self.path)}


def report(
    reports: Annotated[
        Sequence[Path],
        Flag("reports", metavar="REPORT..."),
        Doc("JSON files that --output wrote, or tune.json."),
    ],
    *,
    output: Annotated[str | Path, Flag("--output", "-o"), Doc("Write the page here, as HTML.")],
) -> DrawnFile:
    """Make one self-contained HTML page of reports: tables, plots, headline numbers, how it was measured."""
    from ropecli.reporting.page import write_page
    from ropecli.reporting.report_files import read_reports

    page = as_path(output)
    if page.suffix.lower() not in (".html", ".htm"):
        raise OutputError(f"{page} has not the ending of a page, .html.")
    refuse_outputs(drawn=page)
    write_page(page, read_reports([as_path(one) for one in listed(reports)]))
    return DrawnFile("page", page)
