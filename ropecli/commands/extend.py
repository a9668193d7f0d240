"""`ropecli extend`: finds the right extension of a checkpoint to a length, and writes it."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

from annotated_doc import Doc

from ropecli.commands import options
from ropecli.errors import DataError, MethodError
from ropecli.evaluation import request
from ropecli.evaluation.loading_options import loading_of
from ropecli.messages import duration, say, warn
from ropecli.signature import Flag, Interval, OneOf, command

if TYPE_CHECKING:
    from ropecli.engines.engine_export import Export
    from ropecli.tuning.extension import Choice, Measured

NOTHING_READS_FAR = 3
"""Exit status."""


@dataclass(frozen=True)
class Extended:
    """checkpoint, length, max_short_cost (percent): what was asked for. short_length: of the cost, tokens.

    candidates: labels. seconds: estimated. choice: None for a dry run. output: the written folder, None if nothing was
    written. export: how to serve it.
    """

    checkpoint: str
    length: int
    short_length: int
    max_short_cost: float
    candidates: Sequence[str]
    seconds: float
    choice: "Choice | None" = None
    output: Path | None = None
    export: "Export | None" = None

    @property
    def exit_status(self) -> int:
        return NOTHING_READS_FAR if self.choice and self.choice.chosen is None else 0

    def as_json(self) -> dict[str, Any]:
        from ropecli.evaluation.report import as_json

        choice = self.choice
        return {
            "checkpoint": self.checkpoint,
            "length": self.length,
            "short_length": self.short_length,
            "max_short_cost": self.max_short_cost,
            "candidates": list(self.candidates),
            "estimated_seconds": self.seconds,
            "chosen": choice.chosen.subject.label if choice and choice.chosen else None,
            "output": str(self.output) if self.output else None,
            "command": self.export.command if self.export else None,
            "measured": [_row(measured) for measured in choice.measured] if choice else [],
            **as_json(choice.reports if choice else []),
        }


def _row(measured: "Measured") -> dict[str, Any]:
    of_far = {"far_nll": measured.far.value, "documents": measured.far.samples}
    changes = {"recall": asdict(measured.recall), "cost": asdict(measured.cost)}
    return {"label": measured.subject.label, **of_far, **changes}


class ExtendOptions(request.EvalTextOptions, request.LoadingOptions, total=False): ...


@command
def extend(
    checkpoint: request.CheckpointName,
    *,
    length: Annotated[int, Flag("--length", "-l"), Interval(ge=2, le=2**24), request.TOKENS, Doc("Tokens to read.")],
    output: Annotated[
        str | Path | None, Flag("--output", "-o", metavar="DIR"), Doc("Folder to write."), request.OUTPUT
    ] = None,
    data: Annotated[
        str,
        Flag("--data", "-d"),
        Doc("Your texts: a file or folder of text or rows, or a Hub dataset."),
        request.DATA,
        request.IS_DATA,
    ] = "demo",
    serve: Annotated[
        str,
        OneOf(("transformers", "ropecli", "vllm", "sglang", "llama.cpp", "ollama", "mlx")),
        Doc("What will run it. ropecli: transformers with ropecli's attention, for distance methods."),
    ] = "transformers",
    max_short_cost: Annotated[
        float, Interval(ge=0, le=1000), Doc("Percent that perplexity may rise within the pretraining length.")
    ] = 2.0,
    budget: Annotated[
        str | None, Flag("--budget", metavar="TIME"), Doc("Time to measure, such as 20m or 2h. Default: all rounds.")
    ] = None,
    max_documents: Annotated[int, Interval(ge=2), Doc("Maximum number of documents to measure on."), request.DATA] = 16,
    weights: options.Weights = "link",
    dry_run: Annotated[bool, Doc("Print the candidates and the time, and write nothing."), request.OUTPUT] = False,
    resume: options.Resume = False,
    revision: request.Revision = None,
    **shared: Unpack[ExtendOptions],
) -> Extended:
    """Find the right extension on your texts, and write it.

    Tries the methods that need no training and that --serve computes, with headroom. Chooses by how well far text is
    used, within --max-short-cost. Exit status 3: no candidate reads far; nothing is written.
    """
    seconds, loading = _seconds(budget), loading_of(shared)
    folder = options.folder_to_write(output, dry_run=dry_run)

    from ropecli.checkpoint.files import EXTENSION
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.resume import open_state, refuse_interrupted, remove_state

    refuse_interrupted(folder, resume)
    opened = open_checkpoint(checkpoint, weights=True, tokenizer=True, revision=revision)
    options.say_opening(checkpoint)
    from ropecli.evaluation.driver import Store, interruptible
    from ropecli.evaluation.report import write_report
    from ropecli.tuning.extension import make_extension

    if data == "demo":
        warn("Measuring on the text of the package, since no --data is given: Python source. Use your own texts.")
    texts: Any = {**shared, "data": data, "max_documents": max_documents, "min_tokens": None, "max_tokens": None}
    search = make_extension(opened, length, serve, texts, loading, max_short_cost / 100)
    labels = [subject.label for subject in search.candidates]
    least, estimated = search.estimated_seconds()
    time = f"some {duration(estimated)}" + ", with what is measured already" * resume
    say(f"Candidates that {serve} runs: {', '.join(labels)}. Measuring takes {time}.")
    if seconds is not None and least > seconds and not resume:
        raise MethodError(
            f"--budget is {budget}; a round on {search.rounds[0]} documents takes some {duration(least)}. Allow "
            "more, or measure on fewer with --max-documents."
        )
    asked = Extended(checkpoint, length, search.short_length, max_short_cost, labels, estimated)
    if folder is None:
        return asked
    with interruptible(folder), open_state(folder, search.request()) as state:
        try:
            choice = search.choose(Store(state), budget=seconds)
        except DataError:
            remove_state(folder)  # the same command would end so again
            raise
        export = _write(choice, folder, serve, link=weights == "link")
        written = folder if folder.exists() else None
        result = replace(asked, choice=choice, output=written, export=export)
        if written:
            write_report(folder / EXTENSION, result.as_json())
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


def _write(choice: "Choice", folder: Path, serve: str, *, link: bool) -> "Export | None":
    """Write the checkpoint, if one was chosen and is not there as it is, and the page. Returns how to serve it."""
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.commands.patch import write_plan
    from ropecli.engines.engine_export import ENGINES, export_checkpoint
    from ropecli.reporting.page import render_page

    chosen = choice.chosen
    if chosen is None:
        return None
    served = chosen.subject.checkpoint
    if chosen.subject.plan:
        write_plan(chosen.subject.plan, folder, link=link, verify=True)
        (folder / "extend.html").write_text(render_page(choice.reports), encoding="utf-8")
        served = open_checkpoint(folder)
    return export_checkpoint(served, serve) if serve in ENGINES else None
