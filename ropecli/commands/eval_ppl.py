"""`ropecli eval-ppl`: perplexity of a checkpoint at several lengths, with or without a baseline."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_doc import Doc

from ropecli.commands import options
from ropecli.commands.messages import warn
from ropecli.commands.outputs import refuse_outputs
from ropecli.errors import DataError, NotFiniteError

if TYPE_CHECKING:
    from ropecli.commands.measuring import PerplexityRun
    from ropecli.commands.subject import Subject
    from ropecli.evaluation.eval_report import EvalReport
    from ropecli.evaluation.saved_progress import EvalProgress


def eval_ppl(
    checkpoint: options.Checkpoint,
    *,
    data: options.Data,
    lengths: options.Lengths = None,
    protocol: options.ProtocolName = "prefix",
    stride: options.Stride = None,
    targets: options.Targets = None,
    evaluator: options.Evaluator = None,
    keys: options.KeysFile = None,
    baseline: Annotated[
        str | None, Doc("Second checkpoint to measure on the same tokens. Adds cost and gain with intervals.")
    ] = None,
    method: options.InMemory = None,
    factor: options.Factor = None,
    settings: options.Settings = None,
    factors_file: options.FactorsFile = None,
    original_length: options.OriginalLength = None,
    max_documents: options.MaxDocuments = None,
    min_tokens: options.MinTokens = None,
    max_tokens: options.MaxTokens = None,
    text_column: options.TextColumn = "text",
    dataset_config: options.DatasetConfig = None,
    split: options.Split = None,
    chunk: options.Chunk = None,
    batch_size: options.BatchSize = 1,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
    max_memory: options.MaxMemory = None,
    load_in_8bit: options.LoadIn8bit = False,
    load_in_4bit: options.LoadIn4bit = False,
    attn: options.Attn = "auto",
    output: options.ReportFile = None,
    resume: options.Resume = False,
    revision: options.Revision = None,
) -> "EvalReport":
    """Measure perplexity at several context lengths, with a 95% interval over documents.

    Several processes, started by `accelerate launch -m ropecli eval-ppl ...`, share the documents.
    """
    from ropecli.commands.measuring import DataChoice, interruptible, prepare_run
    from ropecli.commands.subject import open_subject, refuse_attention
    from ropecli.evaluation.eval_report import write_report
    from ropecli.evaluation.processes import join_workers
    from ropecli.evaluation.protocols import Protocol
    from ropecli.resume import refuse_interrupted, remove_state

    report_file, key_file = options.optional_path(output), options.optional_path(keys)
    refuse_outputs(report_file, keys=key_file)
    refuse_interrupted(report_file, resume)
    loading = options.loading_of(dtype, device, attn, device_map, max_memory, load_in_8bit, load_in_4bit)
    asked = Protocol(protocol, stride, targets)
    subject = open_subject(checkpoint, revision, method, factor, settings, factors_file, original_length)
    base = open_subject(baseline) if baseline else None
    for one in (subject, base) if base else (subject,):
        refuse_attention(one.checkpoint, one.plan, attn)
    for warning in [*subject.warnings, *(f"the baseline: {text}" for text in (base.warnings if base else ()))]:
        warn(warning)
    run = prepare_run(
        subject.checkpoint,
        DataChoice(
            options.with_config(data, dataset_config), text_column, split, max_documents, min_tokens, max_tokens
        ),
        lengths,
        asked,
        reach=subject.reach,
        chunk=chunk,
        batch_size=batch_size,
        loading=loading,
        workers=join_workers(),
        evaluator=evaluator,
        key_file=key_file,
    )
    if base:
        _refuse_another_vocabulary(run, base)
    with interruptible(report_file):
        report = _measure(run, subject, base, report_file)
    if run.workers.first:
        if report_file:
            write_report(report_file, report.as_json())
        remove_state(report_file)
    return report


def _refuse_another_vocabulary(run: "PerplexityRun", baseline: "Subject") -> None:
    """Compares only the tokens that are read."""
    import numpy as np

    from ropecli.live.loading import load_tokenizer

    used = np.unique(np.concatenate([document.ids for document in run.documents.kept])).tolist()
    tokenizers = (run.tokenizer, load_tokenizer(baseline.checkpoint))
    words = [tokenizer.convert_ids_to_tokens(used) for tokenizer in tokenizers]
    if words[0] != words[1]:
        raise DataError(
            "The baseline's tokenizer has another vocabulary, so the two cannot read the same tokens. Evaluate each by "
            "itself and compare bits per byte."
        )


def _measure(run: "PerplexityRun", subject: "Subject", base: "Subject | None", output: Path | None) -> "EvalReport":
    """Measure both checkpoints, one model in memory at a time."""
    from ropecli.checkpoint.state import read_state
    from ropecli.evaluation.results import headlines
    from ropecli.evaluation.saved_progress import open_progress

    with open_progress(output, _request(run, subject, base), run.workers.rank) as progress:
        report = _measure_one(run, subject, progress, "model")
        if base is None:
            return report
        try:
            baseline = _measure_one(run, base, progress, "baseline")
        except NotFiniteError as error:
            warn(f"The baseline was not measured: {error}")
            return report
    context_length = read_state(base.checkpoint).context_length
    found = headlines(report.rows, baseline.rows, run.protocol, context_length)
    if len(found) < 2:
        warn(
            f"Short-context cost and long-context gain need a length up to the baseline's context length, "
            f"{context_length} tokens, and a longer one."
        )
    return replace(report, baseline=baseline, headlines=found)


def _measure_one(run: "PerplexityRun", subject: "Subject", progress: "EvalProgress", part: str) -> "EvalReport":
    from ropecli.commands.subject import load
    from ropecli.evaluation.perplexity import evaluate_perplexity
    from ropecli.live.rotary import follows_length

    model = load(subject.checkpoint, run.tokenizer, **run.loading)
    switching = subject.patch(model) or follows_length(model, run.lengths[-1])
    with run.scoring(progress, [switching]) as scoring:
        rows = evaluate_perplexity(model, run.documents, run.lengths, switching=switching, part=part, **scoring)
    return run.report(subject, model, rows)


def _request(run: "PerplexityRun", subject: "Subject", base: "Subject | None") -> dict[str, Any]:
    """Everything that the numbers depend on."""
    from ropecli.commands.subject import fingerprint

    return {
        "checkpoint": subject.checkpoint.digest(),
        "baseline": base.checkpoint.digest() if base else None,
        "method": subject.spec.method.name,
        "factor": subject.spec.factor,
        "params": dict(subject.spec.params),
        "in_memory": fingerprint(subject.plan),
        **run.request(),
    }
