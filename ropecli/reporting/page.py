"""Writes reports as one self-contained HTML page, without scripts or external resources.

The template escapes everything that comes from a report; pictures are embedded as data.
"""

import base64
import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropecli.atomic import new_file
from ropecli.errors import DataError
from ropecli.evaluation.protocol_descriptions import PROTOCOLS
from ropecli.evaluation.report import EvalReport, RetrievalReport, RulerReport
from ropecli.reporting import cells
from ropecli.reporting.lines import METRICS, PPL, data_note, named_lines
from ropecli.reporting.plot_kinds import KINDS
from ropecli.reporting.report_files import Report
from ropecli.reporting.wording import HEADLINES_NOTE, clean, headline_sentence, protocol_name, ruler_sentences
from ropecli.tuning.tune_report import TuneReport
from ropecli.version import GENERATOR

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LONGEST_TEXT = 10_000
"""Maximum characters of one value."""


@dataclass(frozen=True)
class Picture:
    """title: the alternative text. data: a PNG in base64."""

    title: str
    data: str


@dataclass(frozen=True)
class PageSection:
    """A section on several reports or one tuning run. notes: include skipped plots. reports: shown with details."""

    title: str
    words: str
    comparison: cells.ComparisonTable | None
    table: cells.TextTable | None
    pictures: list[Picture]
    notes: list[str]
    reports: Sequence[Report] = ()


def write_page(path: Path, reports: Sequence[Report]) -> None:
    """Write the page. Raises OutputError."""
    page = render_page(reports)
    with new_file(path) as partial:
        partial.write_text(page, encoding="utf-8")


def render_page(reports: Sequence[Report]) -> str:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, finalize=_finalize, trim_blocks=True)
    environment.globals.update(sentence=headline_sentence, headlines_note=HEADLINES_NOTE, details=_details)
    environment.globals.update(
        measured_rows=cells.measured_rows, pivot=cells.pivot, length_summary=cells.length_summary
    )
    environment.globals.update(ruler_scores=cells.ruler_scores, ruler_sentences=ruler_sentences)
    template = environment.from_string(resources.files("ropecli.reporting").joinpath("page.html").read_text("utf-8"))
    measured = [report for report in reports if isinstance(report, EvalReport)]
    retrieved = [report for report in reports if isinstance(report, RetrievalReport)]
    ruled = [report for report in reports if isinstance(report, RulerReport)]
    tuned = [report for report in reports if isinstance(report, TuneReport)]
    tasks = dict.fromkeys((report.task, report.mode) for report in retrieved)
    return template.render(
        title=_title(reports),
        generator=GENERATOR,
        protocols=[
            _protocol([report for report in measured if report.protocol == name])
            for name in dict.fromkeys(report.protocol for report in measured)
        ],
        measured=measured,
        retrieved=retrieved,
        grids=[
            _picture(KINDS["retrieval"].figure([one for one in retrieved if (one.task, one.mode) == task]))
            for task in tasks
        ],
        ruled=ruled,
        rulers=[_picture(KINDS["ruler"].figure(ruled))] if ruled else [],
        tunings=[*([_tuning_runs(tuned)] if len(tuned) > 1 else []), *map(_tuning, tuned)],
    )


def _finalize(value: Any) -> Any:
    from markupsafe import Markup

    return clean(value, _LONGEST_TEXT) if isinstance(value, str) and not isinstance(value, Markup) else value


def _title(reports: Sequence[Report]) -> str:
    names = list(dict.fromkeys(report.checkpoint for report in reports))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    what = "Tuning of " if all(isinstance(report, TuneReport) for report in reports) else "Evaluation of "
    return what + ", ".join(clean(name, 60) for name in names[:3]) + more


def _protocol(reports: list[EvalReport]) -> PageSection:
    """Section of one protocol: its definition, and a comparison of its reports."""
    name = reports[0].protocol
    metrics = ["ppl"]
    if data_note(reports, PPL) and all(row.bits_per_byte for report in reports for row in report.rows):
        metrics.append("bits-per-byte")
    kinds = ["perplexity", "comparison"] if len(named_lines(reports)) > 1 else ["perplexity"]
    wanted = [(kind, metric) for metric in metrics for kind in kinds]
    pictures, skipped = _drawn([*wanted, ("context", "ppl")], reports)
    compared = cells.compare(reports)
    title = f"Perplexity, protocol {name}"
    return PageSection(title, PROTOCOLS[name].definition, compared, None, pictures, skipped)


def _tuning_runs(reports: Sequence[TuneReport]) -> PageSection:
    pictures, skipped = _drawn([("tuning", "ppl"), ("tuned-frequencies", "ppl")], reports)
    other = "Different checkpoints, data or lengths: the perplexities are not comparable."
    notes = skipped if cells.of_same_tokens(reports) else [other, *skipped]
    return PageSection("Comparison of tuning runs", "", None, cells.tuning_runs(reports), pictures, notes)


def _tuning(report: TuneReport) -> PageSection:
    kinds = ["tuning", *(["gains"] if report.gains else []), "tuned-frequencies"]
    pictures, skipped = _drawn([(kind, "ppl") for kind in kinds], [report])
    title = f"{report.checkpoint}, {cells.tuned_method(report)}: tuning ({report.level})"
    return PageSection(title, "", None, cells.tuning_states(report), pictures, skipped, [report])


def _drawn(wanted: Iterable[tuple[str, str]], reports: Sequence[Report]) -> tuple[list[Picture], list[str]]:
    """(pictures, reasons for skipped ones). wanted: (kind, metric) of each."""
    drawn, skipped = [], []
    for kind, metric in wanted:
        try:
            drawn.append(_picture(KINDS[kind].figure(reports, METRICS[metric])))
        except DataError as error:
            skipped.append(f"Skipped the {kind} plot: {str(error).partition('. ')[0]}.")
    return drawn, skipped


def _picture(figure: "Figure") -> Picture:
    from ropecli.reporting.figures.style import as_png

    return Picture(figure.get_suptitle().replace("\n", " "), base64.b64encode(as_png(figure)).decode())


def _details(report: Report) -> list[tuple[str, str]]:
    """(name, value) of everything needed to judge the numbers or reproduce them."""
    patched = ", patched in memory" if not isinstance(report, TuneReport) and report.in_memory else ""
    details = [
        ("checkpoint", report.checkpoint + patched),
        ("checkpoint digest", report.digest),
        ("scaling", f"{report.method} ×{report.factor:g}"),
        ("parameters", _json(report.params) if report.params else "defaults"),
        ("pretraining length", f"{report.original_max_position_embeddings} tokens"),
        ("data", report.source),
        ("token fingerprint", report.fingerprint),
        *_kind_details(report),
    ]
    settings = {name: value for name, value in report.settings.items() if value is not None}
    details += [("settings", _json(settings)), ("dtype and device", f"{report.dtype} on {report.device}")]
    versions = ", ".join(f"{name} {version}" for name, version in report.environment.items())
    details.append(("versions", versions))
    return [*details, ("command", shlex.join(report.command))]


def _kind_details(report: Report) -> list[tuple[str, str]]:
    """Details of one kind of report."""
    if isinstance(report, EvalReport):
        return [
            ("documents", f"{len(report.document_names)} evaluated, {report.too_short} skipped as too short"),
            ("protocol", protocol_name(report)),
        ]
    if isinstance(report, RetrievalReport):
        return [("task", f"{report.task} ({report.mode})"), ("chance level", f"{100 * report.chance:.3g}%")]
    if isinstance(report, RulerReport):
        return [("mode", report.mode)]
    return [
        ("target", f"{report.target_length} tokens"),
        ("attention factor", f"{report.attention_factor:.6g}"),
        ("measurements", f"{len(report.points):,}"),
        ("effect of rounding the weights", f"{report.rounding:.2g} of the largest logit"),
    ]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
