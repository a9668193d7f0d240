"""ropecli tune: find what suits a model by measuring, and write it as a checkpoint."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropecli.cli import evaluation, options, scaling

if TYPE_CHECKING:
    from ropecli.tuning.procedure import TuneResult
    from ropecli.tuning.tuning_task import TuningTask

_LARGEST_SEED = 2**31 - 1


def command(
    checkpoint: options.Checkpoint,
    data: Annotated[
        str, typer.Option("--data", "-d", help="'demo-train', a file or folder of text or rows, or a Hub dataset id.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.")],
    factor: Annotated[float, typer.Option(help="Target length ÷ pretraining length.")],
    level: Annotated[
        str,
        typer.Option(
            help="grid: a method's constants, by forward passes alone. heads: on top of them a gain and a phase of "
            "each query head and rotary pair, folded into the weights. lora: on top of them low-rank updates of "
            "queries and keys, merged. search: LongRoPE's evolutionary search for a factor of each pair."
        ),
    ] = "heads",
    methods: Annotated[
        str,
        typer.Option("--methods", "-m", help="Whose constants are tried, with commas between: yarn,ntk,abf,llama3."),
    ] = "yarn",
    points: Annotated[
        int, typer.Option(min=1, help="How many constants are tried, of all methods together; at least one of each.")
    ] = 24,
    short_weight: Annotated[
        float, typer.Option(help="What a nat at the pretraining length counts, against one at the target.")
    ] = 0.25,
    steps: Annotated[int, typer.Option(min=1, help="heads, lora: updates at most.")] = 100,
    batch_size: Annotated[int, typer.Option(min=1, help="heads, lora: sequences a step.")] = 4,
    rank: Annotated[int, typer.Option(help="lora: of its matrices, 1 to 8.")] = 4,
    population: Annotated[int, typer.Option(min=1, help="search: how many it begins with.")] = 64,
    iterations: Annotated[int, typer.Option(min=0, help="search: generations.")] = 40,
    original_length: scaling.OriginalLength = None,
    max_documents: Annotated[
        int | None, typer.Option(min=1, help="Read at most so many; else 16 and what the steps take.")
    ] = None,
    targets: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens that are judged of each document; else half the pretraining length."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=_LARGEST_SEED, help="Of all that is drawn.")] = 0,
    text_column: evaluation.TextColumn = "text",
    split: Annotated[str | None, typer.Option(help="Of a Hub dataset; 'train' by default.")] = None,
    dtype: evaluation.Dtype = "auto",
    device: evaluation.Device = "auto",
    attn: evaluation.Attn = "auto",
    weights: Annotated[
        str, typer.Option(help="Those that stay: link: hard-link where possible; copy: always copy.")
    ] = "link",
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an interrupted run of the same --output and request.")
    ] = False,
    revision: options.Revision = None,
    as_json: options.AsJson = False,
) -> None:
    """Find by measuring what suits a model at a longer context, and write the checkpoint; stock software loads it.

    The documents of --data are parted: most are learned from, some judge.
    """
    from ropecli.atomic import refuse_existing
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.cli.progress_bar import progress_bar
    from ropecli.cli.terminal import warn
    from ropecli.errors import MethodError
    from ropecli.tuning.tuning_settings import refuse_request

    if weights not in ("link", "copy"):
        raise MethodError(f"--weights is {weights!r}; it must be 'link' or 'copy'.")
    names = list(dict.fromkeys(name.strip() for name in methods.split(",") if name.strip()))
    refuse_request(level, names, factor, data)
    refuse_existing(output)
    opened = open_checkpoint(checkpoint, weights=True, revision=revision)

    from ropecli.resume import refuse_interrupted, remove_state
    from ropecli.tuning.procedure import write_tuned
    from ropecli.tuning.tuning_settings import tune_settings
    from ropecli.tuning.tuning_state import saved_tuning_state
    from ropecli.tuning.tuning_task import make_task

    refuse_interrupted(output, resume)
    settings = tune_settings(
        level,
        methods=names,
        points=points,
        steps=steps,
        batch_size=batch_size,
        rank=rank,
        population=population,
        iterations=iterations,
        seed=seed,
        original_length=original_length,
    )
    with progress_bar("reading documents", None) as step:
        task = make_task(
            opened,
            factor,
            data,
            settings,
            short_weight=short_weight,
            targets=targets,
            max_documents=max_documents,
            text_column=text_column,
            split=split,
            loading={"dtype": dtype, "device": device, "attn": attn},
            advance=step,
        )
    if short := task.calibration.evaluated.too_short:
        warn(f"{evaluation.documents_are(short)} shorter than {task.target_length} tokens and left out.")
    scaling.refuse_attention(opened, task.baseline, attn)
    with evaluation.interruptible(output), saved_tuning_state(output, task.request()) as state:
        refuse_existing(output)  # a run that was going on may have ended meanwhile
        result = _tune(task, state)
        for warning in result.plan.warnings:
            warn(warning)
        proved = write_tuned(result, output, link=weights == "link", say=warn)
    remove_state(output)
    _give(result, output, proved, as_json)


def _tune(task: "TuningTask", state: Any) -> "TuneResult":
    from ropecli.cli.tune_progress import watching
    from ropecli.tuning.procedure import run_task

    model = evaluation.load(task.checkpoint, task.tokenizer, **task.loading, whole=True)
    with watching(task, state.points.all) as on_point:
        return run_task(task, model, state=state, command=evaluation.command_line(), on_point=on_point)


def _give(result: "TuneResult", output: Path, proved: int, as_json: bool) -> None:
    from ropecli.cli.terminal import out, print_json
    from ropecli.reporting.tables import tuning_table

    report = result.report
    if as_json:
        print_json(report.as_json())
        return

    def say(text: str) -> None:
        out.print(text, markup=False, soft_wrap=True)

    out.print(tuning_table(report))
    say(f"{report.checkpoint} → {output}: {report.method} ×{report.factor:g}, {report.target_length} tokens")
    tables = "table agrees" if proved == 1 else "tables agree"
    say(
        f"proved: {proved} live rotary {tables} with the mathematics; stock transformers gives the tuned model's logits"
    )
    lengths = ",".join(map(str, sorted({report.original_max_position_embeddings, report.target_length})))
    say(
        "The documents above chose the result. Measure it on others: "
        f"ropecli eval-ppl {output} --baseline {report.checkpoint} --data HELD_OUT --protocol tail --lengths {lengths}"
    )
