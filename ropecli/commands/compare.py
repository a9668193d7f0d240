"""`ropecli compare`: compares methods, factors and checkpoints."""

from typing import TYPE_CHECKING, Unpack

from ropecli.commands.eval_ppl import measure_documents
from ropecli.evaluation import request
from ropecli.signature import command

if TYPE_CHECKING:
    from ropecli.reporting.outputs import Reports


class CompareOptions(request.ParameterOptions, request.PerplexityOptions, total=False): ...


@command
def compare(
    checkpoints: request.CheckpointNames,
    *,
    methods: request.Methods = ("none", "linear", "ntk", "dynamic", "llama3", "ntk-by-parts", "yarn"),
    factors: request.Factors = (4,),
    **shared: Unpack[CompareOptions],
) -> "Reports":
    """Compare scaling methods by perplexity, or recall: `eval-ppl` with methods.

    Loads each model once and patches it in memory. With several checkpoints, tries every method on each.
    """
    return measure_documents(checkpoints, {"methods": methods, "factors": factors, **shared})
