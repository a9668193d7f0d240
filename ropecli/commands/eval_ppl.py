"""`ropecli eval-ppl`: perplexity of a checkpoint at several lengths, with or without a baseline."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_doc import Doc
from typing_extensions import Unpack

from ropecli.commands import options
from ropecli.commands.messages import warn
from ropecli.commands.outputs import refuse_outputs
from ropecli.commands.signature import command
from ropecli.errors import DataError, NotFiniteError

if TYPE_CHECKING:
    from ropecli.commands.measuring import PerplexityRun
    from ropecli.commands.subject import Subject
    from ropecli.evaluation.eval_report import EvalReport
    from ropecli.evaluation.saved_progress import EvalProgress


class EvalPplOptions(options.DocumentOptions, options.InMemoryOptions, options.PerplexityOptions, total=False): ...


@command
def eval_ppl(
    checkpoint: options.Checkpoint,
    *,
    baseline: Annotated[
        str | None, Doc("Second checkpoint to measure on the same tokens. Adds cost and gain with intervals.")
    ] = None,
    **shared: Unpack[EvalPplOptions],
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

    report_file, key_file = options.optional_path(shared["output"]), options.optional_path(shared["keys"])
    refuse_outputs(report_file, keys=key_file)
    refuse_interrupted(report_file, shared["resume"])
    loading = options.loading_of(shared)
    asked = Protocol(shared["protocol"], shared["stride"], shared["targets"])
    subject = open_subject(checkpoint, shared)
    base = open_subject(baseline, {}) if baseline else None
    for one in (subject, base) if base else (subject,):
        refuse_attention(one.checkpoint, one.plan, shared["attn"])
    for warning in [*subject.warnings, *(f"the baseline: {text}" for text in (base.warnings if base else ()))]:
        warn(warning)
    run = prepare_run(
        subject.checkpoint,
        DataChoice.of(shared),
        shared["lengths"],
        asked,
        reach=subject.reach,
        chunk=shared["chunk"],
        batch_size=shared["batch_size"],
        loading=loading,
        workers=join_workers(),
        evaluator=shared["evaluator"],
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
