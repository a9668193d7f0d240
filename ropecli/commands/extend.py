"""`ropecli extend`: finds the right extension of a checkpoint to a length, trains it if asked, and writes it."""

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

from annotated_doc import Doc

from ropecli import options
from ropecli.atomic import as_path, folder_to_write, optional_path
from ropecli.errors import DataError, MethodError
from ropecli.messages import duration, progress_bar, say, say_opening, warn
from ropecli.options import loading_of
from ropecli.signature import Flag, Interval, OneOf, command

if TYPE_CHECKING:
    from ropecli.engines.engine_export import Export
    from ropecli.evaluation.driver import Store
    from ropecli.evaluation.subject import Subject
    from ropecli.extension.choice import Choice, Extension, Measured
    from ropecli.extension.training import Training

NOTHING_READS_FAR = 3
"""Exit status."""
PAGE = "extend.html"


@dataclass(frozen=True)
class Extended:
    """checkpoint, length, max_short_cost (percent; None: any): what was asked for. short_length: of the cost, tokens.

    candidates: labels. seconds: estimated. choice: None for a dry run, and for a finished run that was resumed. output:
    the written checkpoint, None if nothing was written. page: None if nothing was chosen. export: how to serve it.
    finished: the content of extend.json, if an earlier run had written it. training: what was trained, and the step
    that was kept; None without it.
    """

    checkpoint: str
    length: int
    short_length: int = 0
    max_short_cost: float | None = None
    candidates: Sequence[str] = ()
    seconds: float = 0.0
    choice: "Choice | None" = None
    output: Path | None = None
    page: Path | None = None
    export: "Export | None" = None
    finished: Mapping[str, Any] | None = None
    training: Mapping[str, Any] | None = None

    @property
    def exit_status(self) -> int:
        if self.choice is None:
            return 0
        trained, limit = self.choice.trained, inf if self.max_short_cost is None else self.max_short_cost / 100
        fails = not trained.gains or trained.costs_more(limit) if trained else self.choice.chosen is None
        return NOTHING_READS_FAR if fails else 0

    def as_json(self) -> dict[str, Any]:
        from ropecli.evaluation.kinds import as_json

        if self.finished:
            return dict(self.finished)
        choice = self.choice
        return {
            "checkpoint": self.checkpoint,
            "length": self.length,
            "short_length": self.short_length,
            "max_short_cost": self.max_short_cost,
            "candidates": list(self.candidates),
            "estimated_seconds": self.seconds,
            "chosen": choice.chosen.label if choice and choice.chosen else None,
            "output": str(self.output) if self.output else None,
            "page": str(self.page) if self.page else None,
            "command": self.export.command if self.export else None,
            "copies": self._copies(),
            "measured": [self._row(measured) for measured in choice.measured] if choice else [],
            "training": self.training,
            "trained": self._row(choice.trained) if choice and choice.trained else None,
            **as_json(choice.reports if choice else []),
        }

    def _copies(self) -> dict[str, Any] | None:
        """The classes of Copies that the written or best candidate read in the long texts; None if there are none."""
        from ropecli.evaluation.report import copies_of

        reports = [report for report in (self.choice.reports if self.choice else ()) if report.task == "tail"]
        if len(reports) < 2:
            return None
        base, *_, chosen = reports
        classes = [asdict(each) for each in copies_of(chosen, base)]
        return {"reference_length": base.lengths[-1], "classes": classes}

    def _row(self, measured: "Measured") -> dict[str, Any]:
        from ropecli.checkpoint.provenance import patch_command

        plan, command = measured.subject.plan, None
        if plan:
            options = {"target_length": self.length}
            spec, name = plan.spec, plan.source.name
            command = patch_command(name, None, spec.method.name, spec.factor, spec.params, options=options)
        return {
            **{"label": measured.label, "reads_far": measured.gains, "command": command},
            **{"far_nll": measured.far.value, "documents": measured.far.samples},
            **{"recall": asdict(measured.recall), "cost": asdict(measured.cost)},
        }


class ExtendOptions(options.TextOptions, options.LoadingOptions, total=False): ...


@command
def extend(
    checkpoint: options.CheckpointName,
    *,
    length: Annotated[int, Flag("--length", "-l"), Interval(ge=2, le=2**24), options.TOKENS, Doc("Tokens to read.")],
    output: options.OptionalFolder = None,
    data: Annotated[
        str | None,
        Flag("--data", "-d"),
        Doc("Your texts: a file or folder of text or rows, or a Hub dataset. Default: the package's own text."),
        options.DATA,
        options.IS_DATA,
    ] = None,
    serve: Annotated[
        str,
        OneOf(("transformers", "ropecli", "vllm", "sglang", "llama.cpp", "ollama", "mlx")),
        Doc("What will run it. ropecli: transformers with ropecli's attention, for distance methods."),
    ] = "transformers",
    methods: Annotated[options.Methods, Doc("Try these methods, separated by commas.")] = None,
    factors: Annotated[
        options.Factors,
        Doc("Try these factors, separated by commas. Default: 1, 1.5 and 2 times what the length needs."),
    ] = None,
    max_short_cost: Annotated[
        float | None,
        Interval(ge=0, le=1000),
        Doc("Percent that perplexity may rise within the pretraining length. Default: any."),
    ] = None,
    budget: Annotated[
        str | None,
        Flag("--budget", metavar="TIME"),
        Doc("Time to measure, such as 20m or 2h: fewer candidates, then fewer documents. Default: all."),
    ] = None,
    max_documents: Annotated[int, Interval(ge=2), Doc("Maximum number of documents to measure on."), options.DATA] = 16,
    train: Annotated[
        str | None,
        Flag("--train", metavar="TIME|STEPS"),
        Doc("Then train it on the documents that are not measured on: for a time such as 20m, or a number of steps."),
    ] = None,
    weights: options.Weights = "link",
    dry_run: Annotated[bool, Doc("Print the candidates and the time, and write nothing."), options.OUTPUT] = False,
    resume: options.Resume = False,
    revision: options.Revision = None,
    **shared: Unpack[ExtendOptions],
) -> Extended:
    """Find the right extension on your texts, and write it.

    Tries the methods that need no training and that --serve computes, with headroom. Chooses the one that uses far text
    best. --train takes the best at any cost, and trains the cost away. Exit status 3: no candidate reads far, or none
    within --max-short-cost; nothing is written but what was trained.
    """
    seconds, loading = _seconds("--budget", budget), loading_of(shared)
    steps = int(train) if train and re.fullmatch(r"0*[1-9]\d{0,5}", train) else None
    time = None if steps else _seconds("--train", train)
    if resume and output and (finished := _finished(as_path(output))):
        return finished
    from ropecli.checkpoint.files import RUN
    from ropecli.resume import open_state, refuse_interrupted, remove_state

    refuse_interrupted(None if dry_run else optional_path(output), resume)
    begun = resume and train and output and (as_path(output) / RUN).exists()
    folder = as_path(output) if output and begun else folder_to_write(output, dry_run=dry_run)

    from ropecli.checkpoint.opening import open_checkpoint

    opened = open_checkpoint(checkpoint, weights=True, tokenizer=True, revision=revision)
    say_opening(checkpoint)
    from ropecli.checkpoint.state import read_state
    from ropecli.evaluation.driver import Store, interruptible
    from ropecli.extension.choice import Extension, make_candidates

    if data is None:
        warn("Measuring on the text of the package, since no --data is given: Python source. Use your own texts.")
    candidates = make_candidates(opened, length, serve, methods, factors or ())
    if candidates[0].plan is None:
        say(f"{opened.name} reads {read_state(opened).positions.context_length} tokens as it is.")
    texts: Any = {**shared, "data": data or "demo", "max_documents": max_documents, "max_tokens": None}
    most_cost = inf if max_short_cost is None else max_short_cost / 100
    search = Extension(opened, candidates, length, texts, loading, inf if train else most_cost)
    training = None
    if train:
        from ropecli.extension.training import Training

        training = Training(opened, length, texts, search.measured_on, steps, time)

    def fit(store: Store) -> Extended:
        estimated = search.fit(store, seconds)
        time = f"some {duration(estimated)}" + ", with what is measured already" * resume
        say(f"Candidates that {serve} runs: {', '.join(search.labels)}. Measuring takes {time}.")
        if training:
            say(training.sentence())
        return Extended(checkpoint, length, search.short_length, max_short_cost, search.labels, estimated)

    if folder is None:
        return fit(Store())
    first = training is None or training.launch.is_main
    state = open_state(folder, {**search.request(), "train": train}) if first else nullcontext()
    with interruptible(folder), state as saved:
        store = Store(saved)
        result = Extended(checkpoint, length)
        if first:
            result = fit(store)
            try:
                result = replace(result, choice=search.choose(store))
            except DataError:
                remove_state(folder)  # the same command would end so again
                raise
        if training:
            result = _train(training, search, candidates, result, store, folder, most_cost)
        if first and (choice := result.choice):
            result = _write(result, folder, serve, link=weights == "link")
            if choice.trained or choice.chosen or not choice.measured[0].gains:
                remove_state(folder)  # else what was measured serves a higher --max-short-cost
    return result


def _seconds(option: str, time: str | None) -> float | None:
    if time is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", time)
    if not match or not float(match[1]):
        raise MethodError(f"{option} is {time!r}; expected a time such as 90s, 20m or 2h.")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def _train(
    training: "Training",
    search: "Extension",
    candidates: Sequence["Subject"],
    result: Extended,
    store: "Store",
    folder: Path,
    most_cost: float,
) -> Extended:
    """Train the best candidate into the folder. All processes call it; the main one, which has chosen, measures it."""
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.evaluation.subject import Subject
    from ropecli.training.finetuning import Listener
    from ropecli.training.launch import leave_processes

    launch, choice, part, key = training.launch, result.choice, "training", ("steps",)

    def chosen() -> tuple[int, Any, int | None]:
        assert choice is not None
        best = choice.chosen or choice.measured[0]
        number = next(number for number, each in enumerate(candidates) if each is best.subject)
        return number, search.two_losses(choice), store.values(part).get(key)

    number, losses, steps = launch.from_main(chosen)
    training.steps = training.steps or steps
    with progress_bar("preparing", None) as step:
        listener = Listener(
            say,
            lambda done: step(text=f"step {done.step}, loss {done.loss:.3f}, {done.tokens_per_second:,.0f} tokens/s"),
            lambda phase: step(phase=phase),
        )
        scoring = training.run(
            candidates[number], losses, most_cost, folder, listener, lambda steps: store.add(part, key, steps)
        )
        leave_processes()
    if choice is None:
        return result
    choice = search.add_trained(choice, candidates[number], Subject(open_checkpoint(folder, weights=True)))
    return replace(result, choice=choice, training=training.as_json(scoring))


def _finished(folder: Path) -> Extended | None:
    """The result of an earlier run, if it wrote extend.json."""
    from ropecli.checkpoint.files import CONFIG, EXTENSION, read_json
    from ropecli.resume import remove_state

    if not (written := folder / EXTENSION).is_file():
        return None
    say(f"{folder} is already finished.")
    remove_state(folder)
    record = read_json(written)
    output = folder if (folder / CONFIG).is_file() else None
    return Extended(record["checkpoint"], record["length"], output=output, page=folder / PAGE, finished=record)


def _write(result: Extended, folder: Path, serve: str, *, link: bool) -> Extended:
    """Write the chosen checkpoint, unless it is there as it is, with page and JSON in the same step.

    Returns the result with what was written.
    """
    from ropecli.atomic import new_folder
    from ropecli.checkpoint.files import EXTENSION
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.commands.patch import write_plan
    from ropecli.engines.engine_export import ENGINES, export_checkpoint
    from ropecli.evaluation.report import write_report
    from ropecli.reporting.page import render_page

    choice = result.choice
    if choice is None or (choice.chosen or choice.trained) is None:
        return result
    subject = (choice.trained or choice.chosen).subject  # type: ignore[union-attr]
    is_new = subject.plan is not None or choice.trained is not None
    done = replace(result, output=folder if is_new else None, page=folder / PAGE)

    def finish(partial: Path) -> None:
        nonlocal done
        served = subject.checkpoint
        if subject.plan:
            served = replace(open_checkpoint(partial), name=str(folder))
        done = replace(done, export=export_checkpoint(served, serve) if serve in ENGINES else None)
        record = done.as_json()
        (partial / PAGE).write_text(render_page(choice.reports, record), encoding="utf-8")
        write_report(partial / EXTENSION, record)

    if choice.trained:
        finish(folder)
    elif subject.plan:
        write_plan(subject.plan, folder, link=link, verify=True, check=finish)
    else:
        with new_folder(folder) as partial:
            finish(partial)
    return done
