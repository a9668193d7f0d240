"""A page that holds everything reports say, in one file: no script, and nothing fetched from anywhere.

Whatever comes from a report is escaped by the template; pictures escape their own letters.
"""

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropecli.atomic import new_file
from ropecli.errors import DataError
from ropecli.evaluate.report import EvalReport, RetrievalReport
from ropecli.report.comparison import Comparison, compare
from ropecli.report.kinds import KINDS
from ropecli.report.lines import data_note, named_lines
from ropecli.report.metrics import METRICS
from ropecli.report.pivot import length_summary, pivot
from ropecli.report.plots.retrieval import MOST_PANELS
from ropecli.report.reading import Report, perplexity_reports, retrieval_reports, tune_reports
from ropecli.report.rows import columns_of
from ropecli.report.tuned.cells import Table, runs_of, states_of
from ropecli.report.tuned.course import comparable, method_of
from ropecli.report.wording import HEADLINES_NOTE, PROTOCOLS_IN_WORDS, clean, headline_sentence, protocol_name
from ropecli.tune.record import TuneReport

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.figure import Figure

_LONGEST_TEXT = 10_000
"""Of one value, characters."""


@dataclass(frozen=True)
class _Protocol:
    """The reports of one protocol: what it is, and what they say together. left_out: plots, and why."""

    name: str
    words: str
    comparison: Comparison
    pictures: "list[Markup]"
    left_out: list[str]


@dataclass(frozen=True)
class _Tuning:
    """A tuning run, or several together. reports: whose facts stand below. left_out: plots, and why."""

    title: str
    table: Table
    reports: list[TuneReport]
    pictures: "list[Markup]"
    notes: list[str]
    left_out: list[str]


def write_page(path: Path, reports: Sequence[Report]) -> None:
    """Raises OutputError."""
    page = render_page(reports)
    with new_file(path) as partial:
        partial.write_text(page, encoding="utf-8")


def render_page(reports: Sequence[Report]) -> str:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, finalize=_finalize, trim_blocks=True)
    environment.globals.update(sentence=headline_sentence, headlines_note=HEADLINES_NOTE, columns_of=columns_of)
    environment.globals.update(protocol_name=protocol_name, facts=_facts, pivot=pivot, length_summary=length_summary)
    template = environment.from_string(resources.files("ropecli.report").joinpath("page.html").read_text("utf-8"))
    pictures = _Pictures()
    measured, retrieved = perplexity_reports(reports), retrieval_reports(reports)
    return template.render(
        title=_title(reports),
        protocols=[_protocol(group, pictures) for group in _by_protocol(measured)],
        measured=measured,
        retrieved=retrieved,
        grids=[pictures.add(figure) for figure in _retrieval_figures(retrieved)],
        tunings=_tunings(tune_reports(reports), pictures),
    )


def _finalize(value: Any) -> Any:
    from markupsafe import Markup

    return clean(value, _LONGEST_TEXT) if isinstance(value, str) and not isinstance(value, Markup) else value


def _title(reports: Sequence[Report]) -> str:
    names = list(dict.fromkeys(report.checkpoint for report in reports))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    what = "Tuning of " if len(tune_reports(reports)) == len(reports) else "Evaluation of "
    return what + ", ".join(clean(name, 60) for name in names[:3]) + more


def _by_protocol(reports: Sequence[EvalReport]) -> list[list[EvalReport]]:
    groups: dict[str, list[EvalReport]] = {}
    for report in reports:
        groups.setdefault(report.protocol, []).append(report)
    return list(groups.values())


def _protocol(reports: list[EvalReport], pictures: "_Pictures") -> _Protocol:
    name = reports[0].protocol
    drawn, left_out = _drawn(_wanted(reports), reports, pictures)
    return _Protocol(name, PROTOCOLS_IN_WORDS[name], compare(reports), drawn, left_out)


def _drawn(
    wanted: Iterable[tuple[str, str]], reports: Sequence[Report], pictures: "_Pictures"
) -> "tuple[list[Markup], list[str]]":
    """(pictures, those that could not be drawn and why). wanted: (kind, metric) of each."""
    drawn, left_out = [], []
    for what, metric in wanted:
        try:
            drawn.append(pictures.add(KINDS[what].figure(reports, METRICS[metric])))
        except DataError as error:
            left_out.append(f"The plot of kind {what} is left out: {str(error).partition('. ')[0]}.")
    return drawn, left_out


def _wanted(reports: Sequence[EvalReport]) -> Iterator[tuple[str, str]]:
    """(kind, metric) of the plots that say something of these reports."""
    metrics = ["ppl"]
    if data_note(reports, METRICS["ppl"]) and all(row.bits_per_byte for report in reports for row in report.rows):
        metrics.append("bits-per-byte")
    for metric in metrics:
        yield "perplexity", metric
        if len(named_lines(reports)) > 1:
            yield "comparison", metric
    yield "context", "ppl"


def _retrieval_figures(reports: Sequence[RetrievalReport]) -> "Iterator[Figure]":
    """A picture for each task."""
    tasks = dict.fromkeys((report.task, report.mode) for report in reports)
    for task in tasks:
        own = [report for report in reports if (report.task, report.mode) == task]
        for start in range(0, len(own), MOST_PANELS):
            yield KINDS["retrieval"].figure(own[start : start + MOST_PANELS], METRICS["ppl"])


def _tunings(reports: list[TuneReport], pictures: "_Pictures") -> list[_Tuning]:
    """Several side by side, then each."""
    found = []
    if len(reports) > 1:
        drawn, left_out = _drawn([("tuning", "ppl"), ("tuned-frequencies", "ppl")], reports, pictures)
        other = "Different checkpoints, data or lengths: these perplexities are not of the same tokens."
        notes = [] if comparable(reports) else [other]
        found.append(_Tuning("Tuning runs side by side", runs_of(reports), [], drawn, notes, left_out))
    for report in reports:
        kinds = ["tuning", *(["gains"] if report.gains else []), "tuned-frequencies"]
        drawn, left_out = _drawn([(kind, "ppl") for kind in kinds], [report], pictures)
        title = f"{report.checkpoint}, {method_of(report)}: tuning ({report.level})"
        found.append(_Tuning(title, states_of(report), [report], drawn, [], left_out))
    return found


class _Pictures:
    """Figures as SVG within a page, each with ids of its own."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, figure: "Figure") -> "Markup":
        from markupsafe import Markup

        from ropecli.report.plots.style import as_svg

        self.count += 1
        svg = as_svg(figure)
        svg = svg[svg.index("<svg") :]  # without the XML declaration, which a page may not hold
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg, count=1, flags=re.DOTALL)
        # no one refers to these, and two panels alike have the same
        svg = re.sub(r'<(g|image)\b([^>]*?) id="[^"]*"', r"<\1\2", svg)
        # within tags alone: names are between them
        svg = re.sub(r"<[^>]+>", lambda tag: re.sub(r'( id="|href="#|url\(#)', rf"\1p{self.count}-", tag[0]), svg)
        width, height = re.findall(r'(?:width|height)="([\d.]+)pt"', svg[: svg.index(">")])
        svg = svg.replace(f'width="{width}pt" height="{height}pt"', f'style="width: {width}pt"', 1)
        return Markup(svg)  # matplotlib escapes every letter it writes


def _facts(report: Report) -> list[tuple[str, str]]:
    """(what, value) of whatever a reader needs to judge the numbers, or to make them again."""
    patched = ", patched in memory" if not isinstance(report, TuneReport) and report.in_memory else ""
    facts = [
        ("checkpoint", report.checkpoint + patched),
        ("checkpoint digest", report.digest),
        ("scaling", f"{report.method} ×{report.factor:g}"),
        ("parameters", _json(report.params) if report.params else "the method's own"),
        ("pretraining window", f"{report.original_max_position_embeddings} tokens"),
        ("data", report.source),
        ("fingerprint of the tokens", report.fingerprint),
        *_own_facts(report),
    ]
    settings = {name: value for name, value in report.settings.items() if value is not None}
    facts += [("settings", _json(settings)), ("computed in", f"{report.dtype} on {report.device}")]
    versions = ", ".join(f"{name} {version}" for name, version in report.environment.items())
    facts.append(("versions", versions))
    return [*facts, ("command", shlex.join(report.command))]


def _own_facts(report: Report) -> list[tuple[str, str]]:
    """Of one kind of report alone."""
    if isinstance(report, EvalReport):
        return [
            ("documents", f"{len(report.document_names)} read, {report.too_short} left out as too short"),
            ("protocol", protocol_name(report)),
        ]
    if isinstance(report, RetrievalReport):
        return [("task", f"{report.task} ({report.mode})"), ("a guess finds", f"{100 * report.chance:.3g}%")]
    return [
        ("target", f"{report.target_length} tokens"),
        ("attention factor", f"{report.attention_factor:.6g}"),
        ("measurements", f"{len(report.points):,}"),
        ("moved by rounding the weights", f"{report.rounding:.2g} of the largest logit"),
    ]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
