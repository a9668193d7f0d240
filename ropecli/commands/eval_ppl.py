"""`ropecli eval-ppl`: perplexity, or recall, at several lengths."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack

from ropecli.commands import options
from ropecli.evaluation import request
from ropecli.signature import command

if TYPE_CHECKING:
    from ropecli.reporting.outputs import Reports


class EvalPplOptions(request.InMemoryOptions, request.PerplexityOptions, total=False): ...


@command
def eval_ppl(checkpoints: request.CheckpointNames, **shared: Unpack[EvalPplOptions]) -> "Reports":
    """Measure perplexity, or recall, at several context lengths, with a 95% interval over documents.

    Several processes, started by `accelerate launch -m ropecli eval-ppl ...`, share the documents.
    """
    return measure_documents(checkpoints, shared)


def measure_documents(checkpoints: Sequence[str], shared: EvalPplOptions) -> "Reports":
    from ropecli.evaluation.protocols import Protocol

    protocol, baseline = Protocol(shared["protocol"], shared["stride"], shared["targets"]), shared["baseline"]

    from ropecli.evaluation.tasks.key_tokens import refuse_missing_key_tokens
    from ropecli.evaluation.tasks.perplexity import Perplexity, make_perplexity, refuse_another_vocabulary
    from ropecli.evaluation.tasks.recall import Recall, make_recall
    from ropecli.reporting.outputs import measure

    refuse_missing_key_tokens(shared)
    factory = options.reader_factory_of(shared, shared["batch_size"], shared["evaluator"])

    def make(subjects: Any, workers: Any, outputs: Any) -> Sequence[tuple[Perplexity | Recall, Any]]:
        measured = subjects[1:] if baseline else subjects
        made: Sequence[tuple[Perplexity | Recall, Any]]
        if protocol.name == "recall":
            made = make_recall(measured, subjects[0], shared)
        else:
            made = make_perplexity(measured, shared, protocol, factory, workers, outputs.keys, outputs.report)
        if not baseline:
            return made
        task, tokenizer = made[0]
        refuse_another_vocabulary(task.documents, tokenizer, subjects[0])
        return [(task.up_to(subjects[0].positions.context_length), tokenizer), *made]

    return measure(checkpoints, make, factory, shared)
