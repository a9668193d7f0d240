"""`ropecli eval-ppl`: perplexity of a checkpoint at several lengths, with or without a baseline."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Unpack

from annotated_doc import Doc

from ropecli.commands import options
from ropecli.commands.signature import command
from ropecli.errors import DataError, MethodError
from ropecli.messages import warn

if TYPE_CHECKING:
    from ropecli.evaluation.report import Report
    from ropecli.evaluation.subject import Subject
    from ropecli.evaluation.tasks.perplexity import Perplexity
    from ropecli.evaluation.tasks.recall import Recall


class EvalPplOptions(options.DocumentOptions, options.InMemoryOptions, options.PerplexityOptions, total=False): ...


@command
def eval_ppl(
    checkpoint: options.CheckpointName,
    *,
    baseline: Annotated[
        str | None, Doc("Second checkpoint to measure on the same tokens. Adds cost and gain with intervals.")
    ] = None,
    generate: Annotated[
        bool,
        Doc(
            "recall: generate the passage greedily after its cue, for a server that gives no log-probabilities of a "
            "prompt's tokens, such as llama-server."
        ),
    ] = False,
    **shared: Unpack[EvalPplOptions],
) -> "Report":
    """Measure perplexity, or recall, at several context lengths, with a 95% interval over documents.

    Several processes, started by `accelerate launch -m ropecli eval-ppl ...`, share the documents.
    """
    from ropecli.evaluation.protocols import Protocol

    protocol = Protocol(shared["protocol"], shared["stride"], shared["targets"])
    if generate and protocol.name != "recall":
        raise MethodError(f"--generate applies only to the protocol recall, not to {protocol.name}.")

    from ropecli.evaluation.driver import Job, make_reports
    from ropecli.evaluation.processes import join_workers
    from ropecli.evaluation.report import pair
    from ropecli.evaluation.subject import open_subjects
    from ropecli.evaluation.tasks.key_tokens import refuse_key_token_options
    from ropecli.evaluation.tasks.perplexity import make_perplexity
    from ropecli.evaluation.tasks.recall import make_recall
    from ropecli.reporting.outputs import Outputs

    outputs = Outputs(options.optional_path(shared["output"]), keys=options.optional_path(shared["keys"]))
    outputs.refuse_overwriting(resume=shared["resume"], overwrite=shared["overwrite"])
    factory = options.reader_factory_of(shared, shared["batch_size"], baseline, shared["evaluator"])
    revision, attn = shared["revision"], shared["attn"]
    scaling = {**options.scaling_of(shared), "weights": factory.loads_weights}
    [subject] = open_subjects([checkpoint], revision=revision, attn=attn, **scaling)
    base = open_subjects([baseline], revision=None, attn=attn, prefix="the baseline: ")[0] if baseline else None
    workers = join_workers()
    texts, lengths, first = options.texts_of(shared), shared["lengths"], base or subject
    task: Perplexity | Recall
    if protocol.name == "recall":
        refuse_key_token_options(protocol, shared["evaluator"], outputs.keys)
        [(task, tokenizer)] = make_recall([subject], first, texts, lengths, generate=generate)
    else:
        keys: dict[str, Any] = {"evaluator": shared["evaluator"], "key_file": outputs.keys, "output": outputs.report}
        [(task, tokenizer)] = make_perplexity([subject], texts, lengths, protocol, factory, workers, **keys)
    jobs = [Job(subject, [task], tokenizer)]
    if base:
        _refuse_another_vocabulary(task, tokenizer, base)
        optional = task.kind == "perplexity"
        jobs.append(Job(base, [task.up_to(base.positions.context_length)], tokenizer, optional=optional))
    if task.kind == "recall":
        *measured, report = make_reports(jobs[::-1], factory, outputs.report, workers)  # it refers to the first
        report = replace(report, baseline=next(iter(measured), None))
    else:
        report, *measured = make_reports(jobs, factory, outputs.report, workers)
    if base and measured and task.kind == "perplexity":
        pretraining_length = min(each.positions.pretraining_length for each in (subject, base))
        headlines = pair(report, measured[0], pretraining_length, base.positions.context_length)
        report = replace(report, baseline=measured[0], headlines=headlines)
        if len(headlines) < 2:
            warn(
                "Short-context cost and long-context gain need a length up to the pretraining length, "
                f"{pretraining_length} tokens, and a longer one."
            )
    outputs.write([report], workers, single=True)
    return report


def _refuse_another_vocabulary(task: "Perplexity | Recall", tokenizer: Any, baseline: "Subject") -> None:
    """Compares only the tokens that are read."""
    import numpy as np

    from ropecli.live.loading import load_tokenizer

    used = np.unique(np.concatenate([document.ids for document in task.documents.kept])).tolist()
    words = [reads.convert_ids_to_tokens(used) for reads in (tokenizer, load_tokenizer(baseline.checkpoint))]
    if words[0] != words[1]:
        raise DataError(
            "The baseline's tokenizer has another vocabulary, so the two cannot read the same tokens. Evaluate each by "
            "itself and compare bits per byte."
        )
