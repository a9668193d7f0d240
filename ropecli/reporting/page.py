"""Writes reports as one self-contained HTML page, without scripts or external resources.

The template escapes everything that comes from a report; figures are SVG elements in the colours of the page.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from ropecli.evaluation.report import Report
from ropecli.options import PROTOCOLS
from ropecli.reporting.extended import candidates_table, next_steps, verdict
from ropecli.reporting.figures import style
from ropecli.reporting.figures.plots import panels
from ropecli.reporting.lines import base_of, sets_of
from ropecli.reporting.report_tables import Percent, copies_tables, numbers_table, set_table
from ropecli.reporting.summary import Summary
from ropecli.table import LONGEST_TEXT, Bold, Table, clean
from ropecli.version import VERSION


def render_page(reports: Sequence[Report], record: Mapping[str, Any] | None = None) -> str:
    """The HTML of the page: a verdict, a table and a figure; then, folded, everything else.

    record: what `extend` found with these reports, instead of the verdict and the table of theirs.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    def finalize(value: Any) -> Any:  # jinja2 applies it to every value that the template prints
        return clean(value, LONGEST_TEXT) if isinstance(value, str) and not isinstance(value, Markup) else value

    environment = Environment(autoescape=True, undefined=StrictUndefined, finalize=finalize, trim_blocks=True)
    template = environment.from_string(resources.files("ropecli.reporting").joinpath("page.html").read_text("utf-8"))
    summary = Summary(sets_of(reports))
    sets, table = summary.sets, summary.table()
    first: dict[str, Any] = {"title": table.title, "verdict": summary.sentences(), "table": table, "steps": []}
    if record:
        table = candidates_table(record)
        first = {"title": table.title, "verdict": verdict(record), "table": table, "steps": next_steps(record)}
    folded: dict[str, list[Table]] = {
        "All lengths": [set_table(lines, verbose=True) for lines in sets if len(lines) > 1],
        "Copies in the text": [table for lines in sets for table in copies_tables(lines, verbose=True)],
        "By depth and task": [numbers_table(lines) for lines in sets if lines[0].report.by_row],
        "All numbers": [numbers_table(lines) for lines in sets if not lines[0].report.by_row],
    }
    protocols = dict.fromkeys(report.task for report in reports if report.task in PROTOCOLS)
    return template.render(
        **first,
        generator=f"ropecli {VERSION}",
        tasks=", ".join(dict.fromkeys(lines[0].report.title for lines in sets)),
        figures=_figures(summary),
        folded={name: tables for name, tables in folded.items() if tables},
        scored=any(report.by_row for report in reports),
        protocols=[(name, PROTOCOLS[name]) for name in protocols],
        runs=_runs(reports),
        bold=lambda cell: isinstance(cell, Bold),
        shaded=lambda cell: isinstance(cell, Percent),
    )


def _figures(summary: Summary) -> list[str]:
    """Panels as SVG elements, whose alternative texts say the results."""
    keys = {line.report.identity for line in summary.rows()}
    lines = [line for line in summary.lines if line.report.identity in keys]
    base, length, unit = base_of(lines), summary.length, lines[0].report.unit
    where = f"{lines[0].report.title} at {length} tokens"
    values = ", ".join(f"{line.name} {line.shown(length, unit)}" for line in lines)
    changes = [(line, line.change_from(base, length)) for line in lines if line is not base]
    words = ", ".join(f"{line.name} {line.change_words(change)}" for line, change in changes if change)
    alts = [f"{where}: {values}", f"{where}, change from the base: {words}"]
    svgs = []
    with style.drawing():
        for draw, alt in zip(panels(lines), alts, strict=False):
            figure = style.new_figure(*style.panel_size([line.name for line in lines]))
            draw(figure.subplots(), lines)
            svgs.append(style.as_svg(figure, alt))
    return svgs


def _runs(reports: Sequence[Report]) -> dict[tuple[tuple[str, str], ...], list[str]]:
    """What the reports of each command share, and its models: all that is needed to judge or to reproduce."""
    runs: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for report in reports:
        patched = ", patched in memory" if report.in_memory else ""
        params = f" {json.dumps(report.params, ensure_ascii=False)}" if report.params else ""
        model = f"{report.checkpoint}: {report.method} ×{report.factor:g}{params}{patched}; pretraining length "
        model += f"{report.original_max_position_embeddings} tokens; weights {report.weights}, scaling {report.scaling}"
        runs.setdefault(tuple(_details(report)), []).append(model)
    return runs


def _details(report: Report) -> list[tuple[str, str]]:
    """(name, value) of what the reports of one command have in common."""
    skipped = f", {report.too_short} skipped as too short" if report.too_short else ""
    details = [
        ("measured", report.title),
        ("command", shlex.join(report.command) or "called from Python"),
        ("data", report.source),
        ("token fingerprint", report.fingerprint),
        ("measured on", report.counted + skipped),
    ]
    if report.meaning:
        details.append(("reference", report.meaning))
    settings = {name: value for name, value in report.settings.items() if value is not None}
    return [
        *details,
        ("settings", json.dumps(settings, ensure_ascii=False)),
        ("dtype and device", f"{report.dtype} on {report.device}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in report.environment.items())),
    ]
