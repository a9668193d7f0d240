"""ropecli eval-ppl: perplexity of one checkpoint at several lengths, and of a baseline beside it."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ropecli.cli import evaluation, options, scaling


def command(
    checkpoint: options.Checkpoint,
    data: evaluation.Data,
    lengths: evaluation.Lengths = "256,512,1024,2048",
    protocol: evaluation.ProtocolName = "prefix",
    stride: evaluation.Stride = None,
    targets: evaluation.Targets = None,
    baseline: Annotated[
        str | None,
        typer.Option(help="Measure this checkpoint too, on the same tokens, and say what the other costs and gains."),
    ] = None,
    method: scaling.InMemory = None,
    factor: scaling.Factor = None,
    settings: scaling.Settings = None,
    factors_file: scaling.FactorsFile = None,
    original_length: scaling.OriginalLength = None,
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
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the report here, as JSON.")] = None,
    resume: evaluation.Resume = False,
    revision: options.Revision = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure perplexity at several context lengths, with a 95% interval over documents.

    Several processes, started by `accelerate launch -m ropecli eval-ppl ...`, share the documents.
    """
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.cli.outputs import refuse_outputs
    from ropecli.cli.terminal import parse_numbers, speak_from_first_process, warn
    from ropecli.evaluation.processes import join_workers
    from ropecli.evaluation.protocols import Protocol
    from ropecli.resume import refuse_interrupted, remove_state

    speak_from_first_process()
    refuse_outputs(output)
    refuse_interrupted(output, resume)
    wanted = parse_numbers(lengths, "--lengths", int)
    params = scaling.parameters(method or "none", settings, factors_file)
    asked = Protocol(protocol, stride, targets)
    subject = scaling.planned(
        open_checkpoint(checkpoint, weights=True, revision=revision, adapters=True),
        method,
        factor,
        params,
        original_length,
    )
    base = scaling.planned(open_checkpoint(baseline, weights=True, adapters=True)) if baseline else None
    for one in (subject, base) if base else (subject,):
        scaling.refuse_attention(one.checkpoint, one.plan, attn)
    for warning in [*subject.warnings, *(f"the baseline: {text}" for text in (base.warnings if base else ()))]:
        warn(warning)
    run = evaluation.prepare(
        subject.checkpoint,
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
        workers=join_workers(),
    )
    if base:
        _refuse_another_vocabulary(run, base.checkpoint)
    with evaluation.interruptible(output):
        report = _measure(run, subject, base, output)
    if run.workers.first:
        _give(report, output, as_json)
        remove_state(output)


def _refuse_another_vocabulary(run: evaluation.Run, baseline) -> None:
    """By the tokens that are read: a word more or less elsewhere does not matter."""
    import numpy as np

    from ropecli.errors import DataError
    from ropecli.live.loading import load_tokenizer

    used = np.unique(np.concatenate([document.ids for document in run.documents.kept])).tolist()
    words = [tokenizer.convert_ids_to_tokens(used) for tokenizer in (run.tokenizer, load_tokenizer(baseline))]
    if words[0] != words[1]:
        raise DataError(
            "The baseline's tokenizer has another vocabulary, and the two cannot read the same tokens. Evaluate each "
            "alone, and compare their bits per byte."
        )


def _measure(run: evaluation.Run, subject: scaling.Subject, base: scaling.Subject | None, output: Path | None):
    """The report of both. One model is in memory at a time."""
    from dataclasses import replace

    from ropecli.checkpoint.state import read_state
    from ropecli.cli.terminal import warn
    from ropecli.errors import NotFiniteError
    from ropecli.evaluation.results import headlines
    from ropecli.evaluation.saved_progress import open_progress

    with open_progress(output, _request(run, subject, base), run.workers.rank) as progress:
        report = _measure_one(run, subject, progress, "model")
        if base is None:
            return report
        try:
            baseline = _measure_one(run, base, progress, "baseline")
        except NotFiniteError as error:
            warn(f"the baseline was not measured. {error}")
            return report
    context_length = read_state(base.checkpoint).context_length
    found = headlines(report.rows, baseline.rows, run.protocol, context_length)
    if len(found) < 2:
        warn(
            f"The baseline's context length is {context_length} tokens. Short-context cost and long-context gain want "
            f"a length of at most that, as {context_length} itself, and a longer one."
        )
    return replace(report, baseline=baseline, headlines=found)


def _measure_one(run: evaluation.Run, subject: scaling.Subject, progress, part: str):
    from ropecli.evaluation.perplexity import evaluate_perplexity
    from ropecli.live.rotary import follows_length

    model = evaluation.load(subject.checkpoint, run.tokenizer, **run.loading)
    switching = scaling.patch_in_memory(model, subject.plan) or follows_length(model, run.lengths[-1])
    with run.scoring(progress, [switching]) as options:
        rows = evaluate_perplexity(model, run.documents, run.lengths, switching=switching, part=part, **options)
    in_memory = subject.plan is not None
    return run.report(subject.checkpoint, subject.spec, subject.rope, model, rows, in_memory=in_memory)


def _request(run: evaluation.Run, subject: scaling.Subject, base: scaling.Subject | None) -> dict[str, Any]:
    """What must be the same for a run to be gone on with."""
    return {
        "checkpoint": subject.checkpoint.digest(),
        "baseline": base.checkpoint.digest() if base else None,
        "method": subject.spec.method.name,
        "factor": subject.spec.factor,
        "params": dict(subject.spec.params),
        "in_memory": scaling.fingerprint(subject.plan),
        **run.request(),
    }


def _give(report, output: Path | None, as_json: bool) -> None:
    from ropecli.cli.terminal import out, print_json
    from ropecli.evaluation.eval_report import write_report
    from ropecli.reporting.tables import perplexity_table

    if output:
        write_report(output, report.as_json())
    if as_json:
        print_json(report.as_json())
    else:
        out.print(perplexity_table(report))
