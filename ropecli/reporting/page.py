"""Writes reports as one self-contained HTML page, without scripts or external resources.

The template escapes everything that comes from a report; pictures are embedded as data.
"""

import base64
import json
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from ropecli.errors import shortened
from ropecli.evaluation.protocols import PROTOCOLS
from ropecli.evaluation.report import Report
from ropecli.reporting.figures.style import as_png
from ropecli.reporting.lines import Line, sets_of
from ropecli.reporting.plot_kinds import REPORT_KINDS
from ropecli.reporting.report_files import AnyReport
from ropecli.reporting.report_tables import best_sentence, headline_sentences, report_tables, set_tables
from ropecli.reporting.tuning_runs import tuned_method, tuning_runs, tuning_table
from ropecli.reporting.wording import (
    HEADLINES_NOTE,
    measured_by,
    protocol_name,
    reference_sentence,
    ruler_sentences,
    sample_count,
    score_words,
    task_name,
)
from ropecli.table import Bold, Table, clean
from ropecli.tuning.task import TuneReport
from ropecli.version import GENERATOR

_LONGEST_TEXT = 10_000
"""Maximum characters of one value on the page."""
Picture = tuple[str, str]
"""The alternative text, and a PNG in base64."""


@dataclass(frozen=True)
class PageSection:
    """A section of the page: results, or how a report was measured. details: (name, value) of each setting."""

    title: str
    tables: Sequence[Table]
    pictures: Sequence[Picture] = ()
    details: Sequence[tuple[str, str]] = ()


def render_page(reports: Sequence[AnyReport]) -> str:
    """The HTML of the page: headlines, the results by set of data, then how each report was measured."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    def finalize(value: Any) -> Any:  # jinja2 applies it to every value that the template prints
        return clean(value, _LONGEST_TEXT) if isinstance(value, str) and not isinstance(value, Markup) else value

    environment = Environment(autoescape=True, undefined=StrictUndefined, finalize=finalize, trim_blocks=True)
    template = environment.from_string(resources.files("ropecli.reporting").joinpath("page.html").read_text("utf-8"))
    evaluations = [report for report in reports if isinstance(report, Report)]
    tunings = [report for report in reports if isinstance(report, TuneReport)]
    # those that tell what the extension costs and gains come first
    sets = sorted(sets_of(evaluations), key=lambda lines: not headline_sentences(lines))
    protocols = dict.fromkeys(report.task for report in evaluations if report.kind != "scores")
    return template.render(
        title=_title(reports),
        generator=GENERATOR,
        headlines=[sentence for lines in sets for sentence in _headlines(lines)],
        headlines_note=HEADLINES_NOTE if any(map(headline_sentences, sets)) else "",
        results=[
            *map(_set_section, sets),
            *([PageSection("Comparison of tuning runs", [tuning_runs(tunings)])] if len(tunings) > 1 else []),
            *map(_tuning_section, tunings),
        ],
        scored=any(report.kind == "scores" for report in evaluations),
        protocols=[(name, PROTOCOLS[name].definition) for name in protocols],
        measured=[_how_measured(report) for report in reports],
        bold=lambda cell: isinstance(cell, Bold),
    )


def _title(reports: Sequence[AnyReport]) -> str:
    names = list(dict.fromkeys(report.checkpoint for report in reports))
    what = "Tuning of " if all(isinstance(report, TuneReport) for report in reports) else "Evaluation of "
    return what + shortened(", ".join(clean(name, 60) for name in names), 200)


def _headlines(lines: Sequence[Line]) -> Iterator[str]:
    """Yield the main results of one set: changes from the baseline, else the best line; and the score of each line."""
    report = lines[0].report
    task = task_name(report)
    conditions = f"{measured_by(report)}, {sample_count(report)}"
    for sentence in filter(None, [*headline_sentences(lines), best_sentence(lines)]):
        yield f"{task[:1].upper()}{task[1:]}, {conditions}: {sentence}"
    if report.kind != "scores":
        return
    for line in lines:
        length = line.report.lengths[-1]
        score = f"{score_words(line.report, length)} at {length} tokens"
        effective = f" {ruler_sentences(line.report)[0]}" if report.task == "ruler" else ""
        yield f"{_name(line.report)}: {task}, {score}.{effective}"


def _name(report: AnyReport) -> str:
    """The checkpoint and the method."""
    label = tuned_method(report) if isinstance(report, TuneReport) else report.label
    return f"{clean(report.checkpoint, 60)}, {clean(label)}"


def _set_section(lines: Sequence[Line]) -> PageSection:
    """The tables and plots of one set of data."""
    report = lines[0].report
    tables = set_tables(lines) if len(lines) > 1 else []
    kinds = ["comparison"] if len(lines) > 1 or report.kind == "recall" else []
    kinds += [report.kind] if report.kind in REPORT_KINDS else []
    if report.kind == "scores":
        tables += [table for line in lines for table in report_tables(line.report)]
    else:
        tables = tables or report_tables(report, verbose=False)
    title = f"{task_name(report)}, {measured_by(report)}, {sample_count(report)} of {clean(report.source)}"
    return PageSection(title[:1].upper() + title[1:], tables, _pictures(kinds, [line.report for line in lines]))


def _tuning_section(report: TuneReport) -> PageSection:
    title = f"{_name(report)}: tuning ({report.level})"
    return PageSection(title, [tuning_table(report)])


def _how_measured(report: AnyReport) -> PageSection:
    """The settings and all numbers of a report."""
    if isinstance(report, TuneReport):
        return PageSection(f"{_name(report)}: tuning ({report.level})", [], details=_details(report))
    tables = report_tables(report) if report.kind != "scores" else []
    return PageSection(f"{_name(report)}: {task_name(report)}, {measured_by(report)}", tables, details=_details(report))


def _pictures(kinds: Iterable[str], reports: Sequence[AnyReport]) -> list[Picture]:
    """A plot of each kind."""
    figures = [REPORT_KINDS[kind].draw(reports) for kind in kinds]
    return [(figure.get_suptitle().replace("\n", " "), base64.b64encode(as_png(figure)).decode()) for figure in figures]


def _details(report: AnyReport) -> list[tuple[str, str]]:
    """(name, value) of everything needed to judge the numbers or reproduce them."""
    patched = ", patched in memory" if not isinstance(report, TuneReport) and report.in_memory else ""
    details = [
        ("checkpoint", report.checkpoint + patched),
        ("checkpoint digest", report.digest),
        ("scaling", f"{report.method} ×{report.factor:g}"),
        ("parameters", json.dumps(report.params, ensure_ascii=False) if report.params else "defaults"),
        ("pretraining length", f"{report.original_max_position_embeddings} tokens"),
        ("data", report.source),
        ("token fingerprint", report.fingerprint),
    ]
    if isinstance(report, TuneReport):
        details += [
            ("target", f"{report.target_length} tokens"),
            ("attention factor", f"{report.attention_factor:.6g}"),
            ("measurements", f"{len(report.points):,}"),
            ("effect of rounding the weights", f"{report.rounding:.2g} of the largest logit"),
        ]
    elif report.kind == "scores":
        details += [("task", f"{task_name(report)}, {measured_by(report)}"), ("prompts", sample_count(report))]
    else:
        details += [
            ("documents", f"{sample_count(report)} evaluated, {report.too_short} skipped as too short"),
            ("protocol", protocol_name(report)),
        ]
    if isinstance(report, Report) and report.reference:
        details.append(("reference", reference_sentence(report)))
    settings = {name: value for name, value in report.settings.items() if value is not None}
    details += [
        ("settings", json.dumps(settings, ensure_ascii=False)),
        ("dtype and device", f"{report.dtype} on {report.device}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in report.environment.items())),
        ("command", shlex.join(report.command)),
    ]
    return details
