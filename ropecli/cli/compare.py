"""ropecli compare: methods, factors and checkpoints at several lengths, one table and one plot."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ropecli.cli import evaluation, options, scaling


def command(
    checkpoints: Annotated[
        list[str],
        typer.Argument(metavar="CHECKPOINT...", help="One or several: folders, Hub ids (owner/name), 'demo'."),
    ],
    data: evaluation.Data,
    methods: Annotated[str, typer.Option("--methods", "-m", help="Methods with commas between; as-is: no patch.")] = (
        "none,linear,ntk,dynamic,llama3,ntk-by-parts,yarn"
    ),
    factors: Annotated[str, typer.Option("--factors", "-f", help="Factors with commas between.")] = "4",
    lengths: evaluation.Lengths = "256,512,1024,2048",
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="METHOD.KEY=VALUE", help="A parameter of one method.")
    ] = None,
    protocol: evaluation.ProtocolName = "prefix",
    stride: evaluation.Stride = None,
    targets: evaluation.Targets = None,
    max_documents: evaluation.MaxDocuments = None,
    min_tokens: evaluation.MinTokens = None,
    max_tokens: evaluation.MaxTokens = None,
    text_column: evaluation.TextColumn = "text",
    split: evaluation.Split = None,
    chunk: evaluation.Chunk = None,
    batch_size: evaluation.BatchSize = 1,
    dtype: evaluation.Dtype = "auto",
    device: evaluation.Device = "auto",
    attn: evaluation.Attn = "auto",
    plot: Annotated[Path | None, typer.Option(help="Draw the result here: .png, .svg or .pdf.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the reports here, as JSON.")] = None,
    resume: evaluation.Resume = False,
    revision: options.Revision = None,
    as_json: options.AsJson = False,
) -> None:
    """Compare scaling methods by perplexity, without writing checkpoints: each model is loaded once, patched in memory.

    With several checkpoints, such as sizes of one model, every method is tried on each.
    """
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.cli.outputs import refuse_outputs
    from ropecli.cli.terminal import parse_numbers, speak_from_first_process, warn
    from ropecli.errors import MethodError
    from ropecli.evaluation.comparison import plan_comparison
    from ropecli.evaluation.processes import join_workers
    from ropecli.evaluation.protocols import Protocol
    from ropecli.evaluation.saved_progress import open_progress
    from ropecli.reporting.figures.style import refuse_unknown_ending
    from ropecli.resume import refuse_interrupted, remove_state

    speak_from_first_process()
    refuse_unknown_ending(plot)
    refuse_outputs(output, plot)
    refuse_interrupted(output, resume)
    asked = Protocol(protocol, stride, targets)
    wanted = parse_numbers(lengths, "--lengths", int)
    if revision and len(checkpoints) > 1:
        raise MethodError("--revision is for one checkpoint; which of several it means is not clear.")
    opened = [
        open_checkpoint(name, weights=True, revision=revision, adapters=True) for name in dict.fromkeys(checkpoints)
    ]
    specs = scaling.method_specs(methods, parse_numbers(factors, "--factors", float), settings)
    plans = [plan_comparison(one, specs) for one in opened]
    for one, plan in ((one, plan) for one, own in zip(opened, plans, strict=True) for plan in own):
        scaling.refuse_attention(one, plan, attn)
    for warning in dict.fromkeys(text for one, own in zip(opened, plans, strict=True) for text in _warnings(one, own)):
        warn(warning)
    workers = join_workers()
    runs: list[evaluation.Run] = []
    for one in opened:
        run = evaluation.prepare(
            one,
            data,
            wanted,
            asked,
            reading={
                "min_tokens": min_tokens,
                "max_tokens": max_tokens,
                "max_documents": max_documents,
                "text_column": text_column,
                "split": split,
            },
            loading={"dtype": dtype, "device": device, "attn": attn},
            chunk=evaluation.chunk_size(chunk, wanted[-1]),
            batch_size=batch_size,
            workers=workers,
            before=runs,
        )
        runs.append(run)
    request = _request(opened, plans, runs)
    reports = []
    with evaluation.interruptible(output), open_progress(output, request, workers.rank) as progress:
        for index, (one, own, run) in enumerate(zip(opened, plans, runs, strict=True)):
            reports += _compare(one, own, run, progress, f"{index}: ")
    if workers.first:
        _give(reports, plot, output, as_json)
        remove_state(output)


def _warnings(checkpoint, plans) -> list[str]:
    """What the plans leave open, and what they take out."""
    shipped = scaling.planned(checkpoint).spec
    own = [text for plan in plans if plan for text in plan.settings_warnings]
    if shipped.method.name != "none" and None not in plans:
        own.append(
            f"{checkpoint.name} comes with {shipped.method} ×{shipped.factor:g}, whose place every method here takes; "
            f"--methods {scaling.AS_IS},... measures it as it is too."
        )
    return own


def _compare(checkpoint, plans, run, progress, part: str) -> list:
    """The reports of one checkpoint by every plan."""
    from ropecli.evaluation.comparison import compare_methods, plan_varies_with_length
    from ropecli.live.rotary import follows_length

    model = evaluation.load(checkpoint, run.tokenizer, **run.loading)
    follows = [plan_varies_with_length(plan) if plan else follows_length(model, run.lengths[-1]) for plan in plans]
    with run.scoring(progress, follows) as options:
        results = compare_methods(model, plans, run.documents, run.lengths, part=part, **options)
    return [_report(checkpoint, plan, run, model, rows) for plan, rows in zip(plans, results, strict=True)]


def _report(checkpoint, plan, run, model, rows):
    if plan:
        spec, rope = plan.spec, plan.ropes[plan.scaled[0]]
    else:
        _, spec, rope, *_ = scaling.planned(checkpoint)
    return run.report(checkpoint, spec, rope, model, rows, in_memory=plan is not None)


def _request(opened, plans, runs) -> dict[str, Any]:
    """What must be the same for a run to be gone on with."""
    return {
        "checkpoints": [one.digest() for one in opened],
        "scalings": [[scaling.fingerprint(plan) for plan in own] for own in plans],
        "data": [run.fingerprint for run in runs],
        **{key: value for key, value in runs[0].request().items() if key != "data"},
    }


def _give(reports, plot: Path | None, output: Path | None, as_json: bool) -> None:
    from ropecli.cli.terminal import out, print_json
    from ropecli.evaluation.eval_report import write_report
    from ropecli.reporting.plot_kinds import draw_reports
    from ropecli.reporting.tables import comparison_table

    if plot:
        draw_reports(reports, plot)
    if output:
        write_report(output, [report.as_json() for report in reports])
    if as_json:
        print_json([report.as_json() for report in reports])
        return
    out.print(comparison_table(reports))
    if plot:
        out.print(f"plot: {plot}", markup=False)
