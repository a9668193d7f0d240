"""The commands that measure: `ropecli eval-ppl`, `compare`, `needle` and `ruler`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack

from ropecli.commands import options
from ropecli.errors import MethodError
from ropecli.evaluation import request
from ropecli.names import DEMO
from ropecli.signature import command

if TYPE_CHECKING:
    from ropecli.reporting.outputs import Reports


class EvalPplOptions(request.InMemoryOptions, request.PerplexityOptions, total=False): ...


class CompareOptions(request.ParameterOptions, request.PerplexityOptions, total=False): ...


class NeedleOptions(request.InMemoryOptions, request.NeedleOptions, total=False): ...


class RulerOptions(request.InMemoryOptions, request.RulerOptions, total=False): ...


@command
def eval_ppl(checkpoints: request.CheckpointNames, **shared: Unpack[EvalPplOptions]) -> "Reports":
    """Measure perplexity, or recall, at several context lengths.

    With 95% intervals over documents, which several processes share: `accelerate launch -m ropecli eval-ppl ...`.
    """
    return _measure_documents(checkpoints, shared)


@command
def compare(
    checkpoints: request.CheckpointNames,
    *,
    methods: request.Methods = ("none", "linear", "ntk", "dynamic", "llama3", "ntk-by-parts", "yarn"),
    factors: request.Factors = (4,),
    **shared: Unpack[CompareOptions],
) -> "Reports":
    """Compare methods and checkpoints by perplexity, or recall.

    Loads each model once and patches it in memory. With several checkpoints, tries every method on each.
    """
    return _measure_documents(checkpoints, {"methods": methods, "factors": factors, **shared})


def _measure_documents(checkpoints: Sequence[str], shared: EvalPplOptions) -> "Reports":
    options.begin_measuring(checkpoints, shared)
    from ropecli.evaluation.protocols import Protocol
    from ropecli.evaluation.tasks.perplexity import Perplexity, make_perplexity, refuse_another_vocabulary
    from ropecli.evaluation.tasks.recall import Recall, make_recall
    from ropecli.reporting.outputs import measure

    protocol, baseline = Protocol(shared["protocol"], shared["stride"], shared["targets"]), shared["baseline"]
    factory = options.reader_factory_of(shared, shared["batch_size"])

    def make(subjects: Any) -> Sequence[tuple[Perplexity | Recall, Any]]:
        measured = subjects[1:] if baseline else subjects
        made: Sequence[tuple[Perplexity | Recall, Any]]
        if protocol.name == "recall":
            made = make_recall(measured, subjects[0], shared)
        else:
            made = make_perplexity(measured, subjects[0], shared, protocol)
        if not baseline:
            return made
        task, tokenizer = made[0]
        refuse_another_vocabulary(task.documents, tokenizer, subjects[0])
        return [(task.up_to(subjects[0].positions.context_length), tokenizer), *made]

    return measure(checkpoints, make, factory, shared)


@command
def needle(checkpoints: request.CheckpointNames, **shared: Unpack[NeedleOptions]) -> "Reports":
    """Measure whether a model finds a needle in a long text.

    By length and depth. The key is a random number of five digits.

    Several processes, started by `accelerate launch -m ropecli needle ...`, share the prompts.
    """
    if shared["style"] == "passkey" and shared["data"] != DEMO:
        raise MethodError("--data has no effect with --style passkey, which repeats its own sentences. Remove --data.")
    options.begin_measuring(checkpoints, shared)
    from ropecli.evaluation.tasks.retrieval import make_needle
    from ropecli.reporting.outputs import by_checkpoint, measure

    factory = options.reader_factory_of(shared)
    return measure(checkpoints, by_checkpoint(lambda scalings: make_needle(scalings, shared)), factory, shared)


@command
def ruler(checkpoints: request.CheckpointNames, **shared: Unpack[RulerOptions]) -> "Reports":
    """Find the effective context length, with RULER's tasks.

    The effective length is the longest one up to which the mean score stays at or above --threshold.

    Several processes, started by `accelerate launch -m ropecli ruler ...`, share the prompts.
    """
    options.begin_measuring(checkpoints, shared)
    from ropecli.evaluation.tasks.ruler import make_ruler
    from ropecli.reporting.outputs import by_checkpoint, measure

    factory = options.reader_factory_of(shared, shared["batch_size"])
    return measure(checkpoints, by_checkpoint(lambda scalings: make_ruler(scalings, shared)), factory, shared)
