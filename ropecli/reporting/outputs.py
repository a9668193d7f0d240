"""The outputs of a measuring command: checked before it runs, written at its end."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropecli.atomic import optional_path, refuse_unwritable
from ropecli.evaluation.report import Report, as_json, write_report
from ropecli.reporting.figures.style import refuse_unknown_ending, save
from ropecli.resume import refuse_interrupted, remove_state

if TYPE_CHECKING:
    from ropecli.evaluation.driver import Task
    from ropecli.evaluation.processes import Workers
    from ropecli.evaluation.subject import ReaderFactory, Subject

    MakeTasks = Callable[[Sequence[Subject]], Sequence[tuple[Task, Any]]]


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

        overwrite: whether they may replace existing files.
        """
        refuse_unknown_ending(self.plot)
        refuse_unwritable(self.report, self.plot, overwrite=overwrite)
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
