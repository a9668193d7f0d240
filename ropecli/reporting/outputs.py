"""The outputs of a command: checked before it runs, written at its end.

What was drawn replaces an earlier drawing, and what was measured an earlier measurement with --overwrite. No command
overwrites a file of another kind.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropecli.atomic import optional_path, refuse_unwritable
from ropecli.errors import OutputError
from ropecli.evaluation.report import Report, as_json, write_report
from ropecli.reporting.figures.style import refuse_unknown_ending, save
from ropecli.resume import refuse_interrupted, remove_state

if TYPE_CHECKING:
    from ropecli.evaluation.driver import Task
    from ropecli.evaluation.processes import Workers
    from ropecli.evaluation.subject import ReaderFactory, Subject

    MakeTasks = Callable[[Sequence[Subject]], Sequence[tuple[Task, Any]]]

_LARGEST = 256 * 2**20
_MARKS = {
    ".png": b"Software\0ropecli ",
    ".pdf": b"/Creator (ropecli ",
    ".svg": b"<dc:title>ropecli ",
    ".html": b'<meta name="generator" content="ropecli ',
    ".htm": b'<meta name="generator" content="ropecli ',
}
"""The bytes with which a drawn file names the program that wrote it, by ending."""


@dataclass(frozen=True)
class Reports:
    """The result of a measuring command. reports: the first is compared with. plot: the drawn file."""

    reports: Sequence[Report]
    plot: Path | None = None

    def as_json(self) -> dict[str, Any]:
        return as_json(self.reports)


@dataclass(frozen=True)
class Outputs:
    """report: a JSON file. plot: a picture."""

    report: Path | None = None
    plot: Path | None = None

    def refuse_overwriting(self, *, resume: bool, overwrite: bool) -> None:
        """Raise OutputError for outputs that cannot be written, and for the state of an interrupted run to resume.

        overwrite: whether they may replace those of a finished run.
        """
        refuse_unknown_ending(self.plot)
        refuse_unusable(self.report, self.plot)
        for path in (self.report, self.plot):
            if path and not overwrite and path.exists() and path.stat().st_size:
                raise OutputError(
                    f"{path} exists: it is of a finished run. Choose another name, or replace it with --overwrite."
                )
        refuse_interrupted(self.report, resume)

    def write(self, reports: Sequence[Report], workers: "Workers") -> Reports:
        """Write the reports and the plot, and remove the saved progress. Only the first process of a launch writes."""
        result = Reports(reports, self.plot)
        if not workers.first:
            return result
        if self.plot:
            from ropecli.reporting.figures.plots import draw_reports

            save(draw_reports(reports), self.plot)
        if self.report:
            write_report(self.report, result.as_json())
            remove_state(self.report)
        return result


def measure(
    names: Sequence[str],
    make_tasks: "MakeTasks",
    factory: "ReaderFactory",
    options: Mapping[str, Any],
) -> Reports:
    """Measure a task on every subject.

    make_tasks: returns the task and the tokenizer of each subject. options: of the command: MeasuringOptions.
    """
    from ropecli.evaluation.driver import Job, make_reports
    from ropecli.evaluation.processes import join_workers
    from ropecli.evaluation.subject import open_subjects

    outputs = Outputs(*(optional_path(options.get(name)) for name in ("output", "plot")))
    outputs.refuse_overwriting(resume=options["resume"], overwrite=options["overwrite"])
    baseline = options["baseline"]
    subjects = open_subjects(names, options, baseline=baseline, weights=factory.loads_weights)
    workers = join_workers()
    made = make_tasks(subjects)
    jobs = [Job(subject, task, tokenizer) for subject, (task, tokenizer) in zip(subjects, made, strict=True)]
    if baseline is not None:
        jobs[0] = replace(jobs[0], optional=jobs[0].task.kind == "perplexity")
    return outputs.write(make_reports(jobs, factory, outputs.report, workers), workers)


def by_checkpoint(make: "Callable[[Sequence[Subject]], tuple[Task, Any]]") -> "MakeTasks":
    """Make the tasks of `measure`, one for all scalings of a checkpoint.

    make: takes these scalings, then all other subjects, since default lengths are the same for all.
    """

    def make_tasks(subjects: "Sequence[Subject]") -> "list[tuple[Task, Any]]":
        scalings: dict[int, list[Subject]] = {}
        for subject in subjects:
            scalings.setdefault(id(subject.checkpoint), []).append(subject)
        made = {
            key: make([*members, *(subject for subject in subjects if id(subject.checkpoint) != key)])
            for key, members in scalings.items()
        }
        return [made[id(subject.checkpoint)] for subject in subjects]

    return make_tasks


def refuse_unusable(report: Path | None = None, drawn: Path | None = None, card: Path | None = None) -> None:
    """Raise OutputError for outputs that cannot be written, exclude each other, or exist as another kind of file.

    report: a JSON file. drawn: a picture or a page, with a known ending. card: a model card, which is not
    written through a link, since the user did not choose its name.
    """
    outputs = [path for path in (report, drawn, card) if path]
    for output in outputs:
        refuse_unwritable(output)
    for first, second in permutations(outputs, 2):
        if second.resolve().is_relative_to(first.resolve()):
            raise OutputError(f"{first} and {second} cannot both be written. Give one of them another name.")
    kinds = (
        (report, _holds_reports, "report"),
        (drawn, lambda path, content: _MARKS[path.suffix.lower()] in content, "plot or page"),
        (card, _is_card, "model card"),
    )
    for path, is_earlier, kind in kinds:
        if not path or not (path.exists() or (path == card and path.is_symlink())):
            continue
        size = path.stat().st_size if path.is_file() else _LARGEST + 1
        if size and (size > _LARGEST or not is_earlier(path, path.read_bytes())):
            raise OutputError(f"{path} exists and is not a {kind} of ropecli. Give another name, or delete it.")


def _holds_reports(path: Path, content: bytes) -> bool:
    """Whether it is a file of reports. (A tune.json belongs to its checkpoint.)"""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and "schema_version" in value and isinstance(value.get("reports"), list)


def _is_card(path: Path, content: bytes) -> bool:
    from ropecli.reporting.model_card import BEGIN

    return not path.is_symlink() and BEGIN.encode() in content
