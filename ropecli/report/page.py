"""A page that holds everything reports say, in one file: no script, and nothing fetched from anywhere.

Whatever comes from a report is escaped by the template; pictures escape their own letters.
"""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropecli.atomic import new_file
from ropecli.evaluate.report import EvalReport, RetrievalReport
from ropecli.report.comparison import Comparison, compare
from ropecli.report.kinds import KINDS
from ropecli.report.lines import data_note
from ropecli.report.metrics import METRICS
from ropecli.report.plots.comparison import MOST_LENGTHS, MOST_LINES
from ropecli.report.plots.retrieval import MOST_PANELS
from ropecli.report.reading import Report, perplexity_reports, retrieval_reports
from ropecli.report.rows import columns_of
from ropecli.report.wording import HEADLINES_NOTE, PROTOCOLS_IN_WORDS, clean, headline_sentence, protocol_name

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.figure import Figure

_LONGEST_TEXT = 10_000
"""Of one value, characters."""
_MOST_LINES = 44
"""In a plot against length or context; so many looks there are."""
_Grid = list[tuple[str, list[tuple[str, int]]]]


@dataclass(frozen=True)
class _Protocol:
    """The reports of one protocol: what it is, and what they say together."""

    name: str
    words: str
    comparison: Comparison
    pictures: "list[Markup]"


def write_page(path: Path, reports: Sequence[Report]) -> None:
    """Raises OutputError."""
    page = render_page(reports)
    with new_file(path) as partial:
        partial.write_text(page, encoding="utf-8")


def render_page(reports: Sequence[Report]) -> str:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, finalize=_finalize, trim_blocks=True)
    environment.globals.update(sentence=headline_sentence, headlines_note=HEADLINES_NOTE, columns_of=columns_of)
    environment.globals.update(protocol_name=protocol_name, facts=_facts, grid=_grid)
    template = environment.from_string(resources.files("ropecli.report").joinpath("page.html").read_text("utf-8"))
    pictures = _Pictures()
    measured, retrieved = perplexity_reports(reports), retrieval_reports(reports)
    return template.render(
        title=_title(reports),
        protocols=[_protocol(group, pictures) for group in _by_protocol(measured)],
        measured=measured,
        retrieved=retrieved,
        grids=[pictures.add(figure) for figure in _retrieval_figures(retrieved)],
    )


def _finalize(value: Any) -> Any:
    from markupsafe import Markup

    return clean(value, _LONGEST_TEXT) if isinstance(value, str) and not isinstance(value, Markup) else value


def _title(reports: Sequence[Report]) -> str:
    names = list(dict.fromkeys(report.checkpoint for report in reports))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return "Evaluation of " + ", ".join(clean(name, 60) for name in names[:3]) + more


def _by_protocol(reports: Sequence[EvalReport]) -> list[list[EvalReport]]:
    groups: dict[str, list[EvalReport]] = {}
    for report in reports:
        groups.setdefault(report.protocol, []).append(report)
    return list(groups.values())


def _protocol(reports: list[EvalReport], pictures: "_Pictures") -> _Protocol:
    name = reports[0].protocol
    return _Protocol(
        name, PROTOCOLS_IN_WORDS[name], compare(reports), [pictures.add(figure) for figure in _figures(reports)]
    )


def _figures(reports: Sequence[EvalReport]) -> "Iterator[Figure]":
    """Those kinds that say something of these reports, and can be drawn of them."""
    lines = sum(1 if report.baseline is None else 2 for report in reports)
    metrics = [METRICS["ppl"]]
    if data_note(reports, METRICS["ppl"]) and all(row.bits_per_byte for report in reports for row in report.rows):
        metrics.append(METRICS["bits-per-byte"])
    for metric in metrics:
        if lines <= _MOST_LINES:
            yield KINDS["perplexity"].figure(reports, metric)
        lengths = {row.length for report in reports for row in report.rows}
        if 1 < lines <= MOST_LINES and len(lengths) <= MOST_LENGTHS:
            yield KINDS["comparison"].figure(reports, metric)
    drawn = [report for one in reports for report in (one, one.baseline) if report is not None]
    if lines <= _MOST_LINES and all(report.rows[-1].by_context for report in drawn):
        yield KINDS["context"].figure(reports, METRICS["ppl"])


def _retrieval_figures(reports: Sequence[RetrievalReport]) -> "Iterator[Figure]":
    """A picture for each task."""
    tasks = dict.fromkeys((report.task, report.mode) for report in reports)
    for task in tasks:
        own = [report for report in reports if (report.task, report.mode) == task]
        for start in range(0, len(own), MOST_PANELS):
            yield KINDS["retrieval"].figure(own[start : start + MOST_PANELS], METRICS["ppl"])


class _Pictures:
    """Figures as SVG within a page, each with ids of its own."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, figure: "Figure") -> "Markup":
        from markupsafe import Markup

        from ropecli.report.plots.style import as_svg

        self.count += 1
        svg = as_svg(figure, salt=f"picture {self.count}")
        svg = svg[svg.index("<svg") :]  # without the XML declaration, which a page may not hold
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg, count=1, flags=re.DOTALL)
        svg = re.sub(r'<g id="[^"]*"', "<g", svg)
        width, height = re.findall(r'(?:width|height)="([\d.]+)pt"', svg[: svg.index(">")])
        svg = svg.replace(f'width="{width}pt" height="{height}pt"', f'style="width: {width}pt"', 1)
        return Markup(svg)  # matplotlib escapes every letter it writes


def _facts(report: Report) -> list[tuple[str, str]]:
    """(what, value) of whatever a reader needs to judge the numbers, or to make them again."""
    facts = [
        ("checkpoint", report.checkpoint + (", patched in memory" if report.in_memory else "")),
        ("checkpoint digest", report.digest),
        ("scaling", f"{report.method} ×{report.factor:g}"),
        ("parameters", _json(report.params) if report.params else "the method's own"),
        ("pretraining window", f"{report.original_max_position_embeddings} tokens"),
        ("data", report.source),
        ("fingerprint of the tokens", report.fingerprint),
    ]
    if isinstance(report, EvalReport):
        facts += [
            ("documents", f"{len(report.document_names)} read, {report.too_short} left out as too short"),
            ("protocol", protocol_name(report)),
        ]
    if isinstance(report, RetrievalReport):
        facts += [("task", f"{report.task} ({report.mode})"), ("a guess finds", f"{100 * report.chance:.3g}%")]
    settings = {name: value for name, value in report.settings.items() if value is not None}
    facts += [("settings", _json(settings)), ("computed in", f"{report.dtype} on {report.device}")]
    versions = ", ".join(f"{name} {version}" for name, version in report.environment.items())
    facts.append(("versions", versions))
    return [*facts, ("command", shlex.join(report.command))]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _grid(report: RetrievalReport) -> tuple[list[int], _Grid]:
    """The lengths, and for each depth (name, [(hits of trials, percent)])."""
    lengths = sorted({cell.length for cell in report.cells})
    cells = {(cell.depth, cell.length): cell for cell in report.cells}
    rows = []
    for depth in sorted({cell.depth for cell in report.cells}):
        row = [cells.get((depth, length)) for length in lengths]
        shown = [
            ("–", -1) if cell is None else (f"{cell.hits}/{cell.trials}", round(100 * cell.accuracy)) for cell in row
        ]
        rows.append((f"{depth:.3g}", shown))
    return lengths, rows
