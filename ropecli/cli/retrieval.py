"""What passkey and needle share: their options, the run, and what becomes of its result."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ropecli.cli import evaluation, scaling

LENGTHS = "256,512,1024"
DEPTHS = "0,0.25,0.5,0.75,1"
_LONGEST = 2**24
_CANDIDATES = 10

Lengths = Annotated[
    str, typer.Option("--lengths", "-l", help="Tokens of the prompt with its answer, exactly, as 256,512,1024.")
]
Depths = Annotated[
    str, typer.Option(help="Where the key stands: 0 the beginning of the text, 1 its end, right before the question.")
]
Trials = Annotated[int, typer.Option(min=1, help="Prompts for each length and depth.")]
Seed = Annotated[int, typer.Option(min=0, help="Of keys and texts: the same for every model with the same tokenizer.")]
Mode = Annotated[
    str,
    typer.Option(
        help="rank: the key has the highest log-probability among --candidates, which any base model can be asked. "
        "generate: the greedy answer begins with the key."
    ),
]
Candidates = Annotated[
    int | None,
    typer.Option(
        min=2,
        max=1000,
        help=f"rank: the true key, those of other needles, and some not in the text; else {_CANDIDATES}.",
    ),
]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write the report here, as JSON.")]
Plot = Annotated[Path | None, typer.Option(help="Draw a heat map here: .png, .svg or .pdf.")]


@dataclass(frozen=True)
class Request:
    """What is asked of any checkpoint. lengths: tokens. depths: 0 to 1. chunk: tokens, None for all at once."""

    lengths: list[int]
    depths: list[float]
    trials: int
    seed: int
    mode: str
    candidates: int
    chunk: int | None
    output: Path | None
    plot: Path | None
    as_json: bool


def make_request(
    lengths: str, depths: str, mode: str, chunk: int | None, candidates: int | None, *, keys: int = 1, **others: Any
) -> Request:
    """Raises MethodError, and OutputError for files that could not be written, before anything is loaded."""
    from ropecli.cli.outputs import refuse_outputs
    from ropecli.cli.terminal import parse_numbers, speak_from_first_process
    from ropecli.errors import MethodError
    from ropecli.evaluation.retrieval.accuracy import check_mode

    speak_from_first_process()
    wanted = parse_numbers(lengths, "--lengths", int)
    if wanted[-1] > _LONGEST:
        raise MethodError(f"--lengths has {wanted[-1]}; a prompt may have up to {_LONGEST} tokens.")
    check_mode(mode)
    if mode == "generate":
        if candidates is not None:
            raise MethodError("--candidates has no effect with --mode generate: no answer is ranked. Leave it out.")
        candidates = keys + 1  # drawn all the same, the fewest there may be
    chunk = evaluation.chunk_size(chunk, wanted[-1])
    candidates = _CANDIDATES if candidates is None else candidates
    request = Request(wanted, parse_depths(depths), mode=mode, chunk=chunk, candidates=candidates, **others)
    if request.plot:
        from ropecli.reporting.figures.style import refuse_unknown_ending

        refuse_unknown_ending(request.plot)
    refuse_outputs(request.output, request.plot)
    return request


def parse_depths(text: str) -> list[float]:
    """`0,0.5,1` as sorted numbers without repeats. Raises MethodError."""
    from ropecli.errors import MethodError, shown

    try:
        depths = sorted({float(part) + 0.0 for part in text.split(",") if part.strip()})
    except ValueError:
        depths = []
    if not depths or not all(0 <= depth <= 1 for depth in depths):
        raise MethodError(f"--depths is {shown(text)}; it must be numbers from 0 to 1 with commas between, as 0,0.5,1.")
    return depths


def open_subject(
    name: str,
    revision: str | None,
    method: str | None,
    factor: float | None,
    settings: list[str] | None,
    factors_file: Path | None,
    original_length: int | None,
) -> scaling.Subject:
    """Says the scaling's warnings."""
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.cli.terminal import warn

    params = scaling.parameters(method or "none", settings, factors_file)
    opened = open_checkpoint(name, weights=True, revision=revision, adapters=True)
    subject = scaling.planned(opened, method, factor, params, original_length)
    for warning in subject.warnings:
        warn(warning)
    return subject


def run(
    request: Request,
    subject: scaling.Subject,
    source: str,
    make_task: Callable[[Any], Any],
    settings: dict[str, Any],
    **loading: Any,
) -> None:
    """Measures and gives the report. make_task: the task from the tokenizer's PieceTokenizer. settings: the task's own.

    Of several processes, the first alone gives it.
    """
    from ropecli.evaluation.processes import join_workers
    from ropecli.evaluation.retrieval.haystack import PieceTokenizer
    from ropecli.live.loading import load_tokenizer

    scaling.refuse_attention(subject.checkpoint, subject.plan, loading["attn"])
    tokenizer = load_tokenizer(subject.checkpoint)
    task = make_task(PieceTokenizer(tokenizer))
    # what does not fit is known before the weights are loaded
    task.check_room(request.lengths, request.depths, request.trials)
    workers = join_workers()
    model = evaluation.load(subject.checkpoint, tokenizer, **loading)
    with evaluation.interruptible(None):
        grid = _measure(request, subject, task, model, workers)
    settings = {**settings, "attn": loading["attn"], "processes": workers.count}
    if workers.first:
        _give(request, _report(request, subject, source, task, model, grid, settings))


def _measure(request: Request, subject: scaling.Subject, task, model, workers):
    from ropecli.cli.progress_bar import progress_bar
    from ropecli.cli.terminal import warn
    from ropecli.evaluation.retrieval.accuracy import evaluate_retrieval

    switching = scaling.patch_in_memory(model, subject.plan)
    prompts = range(len(request.lengths) * len(request.depths) * request.trials)
    with progress_bar("asking", len(workers.share(prompts))) as step:
        return evaluate_retrieval(
            model,
            task,
            request.lengths,
            request.depths,
            trials=request.trials,
            mode=request.mode,
            switching=switching,
            chunk=request.chunk,
            workers=workers,
            advance=step,
            say=warn,
        )


def _report(request: Request, subject: scaling.Subject, source: str, task, model, grid, settings: dict[str, Any]):
    from ropecli.evaluation.eval_report import RetrievalReport
    from ropecli.evaluation.retrieval.accuracy import chance_of

    return RetrievalReport(
        checkpoint=subject.checkpoint.name,
        digest=subject.checkpoint.digest(),
        method=subject.spec.method.name,
        factor=subject.spec.factor,
        params=dict(subject.spec.params),
        in_memory=subject.plan is not None,
        original_max_position_embeddings=subject.rope.geometry.original_max_position_embeddings,
        source=source,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        command=evaluation.command_line(),
        task=task.name,
        mode=request.mode,
        settings={
            "introduction": task.templates.introduction,
            "needle": task.templates.needle,
            "question": task.templates.question,
            "keys": task.keys,
            "candidates": task.candidates if request.mode == "rank" else None,
            "trials": request.trials,
            "seed": task.seed,
            "chunk": request.chunk,
            "prompts_read_once": grid.once,
            **settings,
        },
        fingerprint=grid.fingerprint,
        chance=chance_of(task, request.mode),
        cells=grid.cells,
    )


def _give(request: Request, report) -> None:
    from ropecli.cli.terminal import out, print_json
    from ropecli.evaluation.eval_report import write_report
    from ropecli.reporting.tables import retrieval_tables

    if request.output:
        write_report(request.output, report.as_json())
    if request.plot:
        from ropecli.reporting.plot_kinds import draw_reports

        draw_reports([report], request.plot)
    if request.as_json:
        print_json(report.as_json())
    else:
        out.print(retrieval_tables(report))
