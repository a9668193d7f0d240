"""ropecli report: one page that holds everything reports say."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    reports: Annotated[
        list[Path], typer.Argument(metavar="REPORT...", help="JSON files that --output wrote, or tune.json.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Write the page here, as HTML.")],
) -> None:
    """Make one self-contained HTML page of reports: tables, plots, headline numbers, how it was measured."""
    from ropecli.cli.outputs import refuse_outputs
    from ropecli.cli.terminal import out
    from ropecli.errors import OutputError
    from ropecli.reporting.page import write_page
    from ropecli.reporting.report_files import read_reports

    if output.suffix.lower() not in (".html", ".htm"):
        raise OutputError(f"{output} has not the ending of a page, .html.")
    refuse_outputs(drawn=output)
    write_page(output, read_reports(reports))
    out.print(f"page: {output}", markup=False, soft_wrap=True)
