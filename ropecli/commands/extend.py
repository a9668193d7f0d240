"""`ropecli extend`: finds the right extension of a checkpoint to a length, and writes it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

from annotated_doc import Doc

from ropecli.commands import options
from ropecli.errors import DataError, MethodError
from ropecli.evaluation import request
from ropecli.evaluation.loading_options import loading_of
from ropecli.messages import duration, say, warn
from ropecli.signature import Flag, Interval, MinLen, OneOf, command

if TYPE_CHECKING:
    from ropecli.engines.engine_export import Export
    from ropecli.extension.choice import Choice, Measured

NOTHING_READS_FAR = 3
"""Exit status."""
PAGE = "extend.html"


@dataclass(frozen=True)
class Extended:
    """checkpoint, length, max_short_cost (percent; None: any): what was asked for. short_length: of the cost, tokens.

    candidates: labels. seconds: estimated. choice: None for a dry run, and for a finished run that was resumed. output:
    the written checkpoint, None if nothing was written. page: None if nothing was chosen. export: how to serve it.
    finished: the content of extend.json, if an earlier run had written it.
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

    @property
    def exit_status(self) -> int:
        return NOTHING_READS_FAR if self.choice and self.choice.chosen is None else 0

    def as_json(self) -> dict[str, Any]:
        from ropecli.evaluation.report import as_json

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
            **as_json(choice.reports if choice else []),
        }

    def _copies(self) -> dict[str, Any] | None:
        """The classes of Copies that the chosen or best candidate read in the long texts; None if there are none."""
        from ropecli.evaluation.report import copies_of

        reports = [report for report in (self.choice.reports if self.choice else ()) if report.task == "tail"]
        if len(reports) < 2:
            return None
        base, chosen = reports
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


class ExtendOptions(request.TextOptions, request.LoadingOptions, total=False): ...


@command
def extend(
    checkpoint: request.CheckpointName,
    *,
    length: Annotated[int, Flag("--length", "-l"), Interval(ge=2, le=2**24), request.TOKENS, Doc("Tokens to read.")],
    output: Annotated[
        str | Path | None, Flag("--output", "-o", metavar="DIR"), Doc("Folder to write."), request.OUTPUT
    ] = None,
    data: Annotated[
        str | None,
        Flag("--data", "-d"),
        Doc("Your texts: a file or folder of text or rows, or a Hub dataset. Default: the package's own text."),
        request.DATA,
        request.IS_DATA,
    ] = None,
    serve: Annotated[
        str,
        OneOf(("transformers", "ropecli", "vllm", "sglang", "llama.cpp", "ollama", "mlx")),
        Doc("What will run it. ropecli: transformers with ropecli's attention, for distance methods."),
    ] = "transformers",
    methods: Annotated[
        Sequence[str] | None, Doc("Try these methods, separated by commas."), request.IS_METHOD, request.SCALING
    ] = None,
    factors: Annotated[
        Sequence[request.Factor] | None,
        Flag("--factors", "-f"),
        Doc("Try these factors, separated by commas. Default: 1, 1.5 and 2 times what the length needs."),
        MinLen(1),
        request.SCALING,
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
    max_documents: Annotated[int, Interval(ge=2), Doc("Maximum number of documents to measure on."), request.DATA] = 16,
    weights: options.Weights = "link",
    dry_run: Annotated[bool, Doc("Print the candidates and the time, and write nothing."), request.OUTPUT] = False,
    resume: options.Resume = False,
    revision: request.Revision = None,
    **shared: Unpack[ExtendOptions],
) -> Extended:
    """Find the right extension on your texts, and write it.

    Tries the methods that need no training and that --serve computes, with headroom. Chooses the one that uses far text
    best. Exit status 3: no candidate reads far, or none within --max-short-cost; nothing is written.
    """
    seconds, loading = _seconds(budget), loading_of(shared)
    if resume and output and (finished := _finished(options.as_path(output))):
        return finished
    folder = options.folder_to_write(output, dry_run=dry_run)

    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.resume import open_state, refuse_interrupted, remove_state

    refuse_interrupted(folder, resume)
    opened = open_checkpoint(checkpoint, weights=True, tokenizer=True, revision=revision)
    options.say_opening(checkpoint)
    from ropecli.checkpoint.state import read_state
    from ropecli.evaluation.driver import Store, interruptible
    from ropecli.extension.choice import make_candidates, make_extension

    if data is None:
        warn("Measuring on the text of the package, since no --data is given: Python source. Use your own texts.")
    candidates = make_candidates(opened, length, serve, methods, factors or ())
    if candidates[0].plan is None:
        say(f"{opened.name} reads {read_state(opened).positions.context_length} tokens as it is.")
    texts: Any = {**shared, "data": data or "demo", "max_documents": max_documents}
    texts |= {"min_tokens": None, "max_tokens": None}
    most_cost = inf if max_short_cost is None else max_short_cost / 100
    search = make_extension(opened, candidates, length, texts, loading, most_cost)

    def fit(store: Store) -> Extended:
        estimated = search.fit(store, seconds)
        time = f"some {duration(estimated)}" + ", with what is measured already" * resume
        say(f"Candidates that {serve} runs: {', '.join(search.labels)}. Measuring takes {time}.")
        return Extended(checkpoint, length, search.short_length, max_short_cost, search.labels, estimated)

    if folder is None:
        return fit(Store())
    with interruptible(folder), open_state(folder, search.request()) as state:
        store = Store(state)
        planned = fit(store)
        try:
            choice = search.choose(store)
        except DataError:
            remove_state(folder)  # the same command would end so again
            raise
        result = _write(replace(planned, choice=choice), folder, serve, link=weights == "link")
        if choice.chosen or not choice.best.gains:  # else what was measured serves a higher --max-short-cost
            remove_state(folder)
    return result


def _seconds(budget: str | None) -> float | None:
    if budget is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", budget)
    if not match:
        raise MethodError(f"--budget is {budget!r}; expected a time such as 90s, 20m or 2h.")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


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
    if choice is None or choice.chosen is None:
        return result
    subject = choice.chosen.subject
    done = replace(result, output=folder if subject.plan else None, page=folder / PAGE)

    def finish(partial: Path) -> None:
        nonlocal done
        served = subject.checkpoint
        if subject.plan:
            served = replace(open_checkpoint(partial), name=str(folder))
        done = replace(done, export=export_checkpoint(served, serve) if serve in ENGINES else None)
        record = done.as_json()
        write_report(partial / EXTENSION, record)
        (partial / PAGE).write_text(render_page(choice.reports, record), encoding="utf-8")

    if subject.plan:
        write_plan(subject.plan, folder, link=link, verify=True, check=finish)
    else:
        with new_folder(folder) as partial:
            finish(partial)
    return done
