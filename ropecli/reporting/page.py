"""Writes reports as one self-contained HTML page, without scripts or external resources.

The template escapes everything that comes from a report; pictures are embedded as data.
"""

import base64
import json
import shlex
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any

from ropecli.errors import shortened
from ropecli.evaluation.protocols import PROTOCOLS
from ropecli.evaluation.report import Report
from ropecli.reporting.figures.report_plots import choose_kind
from ropecli.reporting.figures.style import as_png
from ropecli.reporting.lines import Line, headline_sentences, sets_of, verdict
from ropecli.reporting.report_files import AnyReport
from ropecli.reporting.report_tables import report_tables, set_tables, tuning_runs, tuning_table
from ropecli.reporting.wording import (
    measured_by,
    reference_sentence,
    ruler_sentences,
    sample_count,
    score_words,
    task_name,
)
from ropecli.table import LONGEST_TEXT, Bold, Table, clean
from ropecli.tuning.task import TuneReport
from ropecli.version import GENERATOR


def render_page(reports: Sequence[AnyReport]) -> str:
    """The HTML of the page: headlines, the results by set of data, then how each report was measured."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    def finalize(value: Any) -> Any:  # jinja2 applies it to every value that the template prints
        return clean(value, LONGEST_TEXT) if isinstance(value, str) and not isinstance(value, Markup) else value

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
        # the tables of each section, the first of which has its title, and its pictures
        results=[
            *((_tables(lines), [_picture(lines)]) for lines in sets),
            *([([tuning_runs(tunings)], [])] if len(tunings) > 1 else []),
            *(([tuning_table(report)], []) for report in tunings),
        ],
        scored=any(report.kind == "scores" for report in evaluations),
        protocols=[(name, PROTOCOLS[name].definition) for name in protocols],
        measured=[(_name(report), _all_numbers(report), _details(report)) for report in reports],
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
    for sentence in verdict(lines):
        yield f"{task[:1].upper()}{task[1:]}, {conditions}: {sentence}"
    if report.kind != "scores":
        return
    for line in lines:
        length = line.report.lengths[-1]
        score = f"{score_words(line.report, length)} at {length} tokens"
        effective = f" {ruler_sentences(line.report)[0]}" if report.task == "ruler" else ""
        yield f"{clean(line.report.checkpoint, 60)}, {clean(line.report.label)}: {task}, {score}.{effective}"


def _name(report: AnyReport) -> str:
    """The checkpoint, the method, and what was measured."""
    if isinstance(report, TuneReport):
        what = f"tuning ({report.level})"
    else:
        what = f"{task_name(report)}, {measured_by(report)}"
    return f"{clean(report.checkpoint, 60)}, {clean(report.label)}: {what}"


def _tables(lines: Sequence[Line]) -> list[Table]:
    """The tables of one set of data."""
    tables = set_tables(lines) if len(lines) > 1 else []
    if lines[0].report.kind == "scores":
        tables += [table for line in lines for table in report_tables(line.report)]
    return tables or report_tables(lines[0].report, verbose=False)


def _all_numbers(report: AnyReport) -> list[Table]:
    """What the results do not show."""
    return report_tables(report) if isinstance(report, Report) and report.kind != "scores" else []


def _picture(lines: Sequence[Line]) -> tuple[str, str]:
    """The alternative text, and a PNG in base64."""
    reports = [line.report for line in lines]
    figure = choose_kind(reports)(reports)
    return figure.get_suptitle().replace("\n", " "), base64.b64encode(as_png(figure)).decode()


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
    else:
        skipped = f", {report.too_short} skipped as too short" if report.too_short else ""
        details.append(("measured on", sample_count(report) + skipped))
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
