"""`ropecli compare`: compares methods, factors and checkpoints."""

from typing import TYPE_CHECKING, Unpack

from ropecli.commands import options
from ropecli.commands.eval_ppl import measure_documents
from ropecli.commands.signature import command

if TYPE_CHECKING:
    from ropecli.reporting.outputs import Reports


class CompareOptions(options.DocumentOptions, options.ParameterOptions, options.PerplexityOptions, total=False): ...


@command
def compare(
    checkpoints: options.CheckpointNames,
    *,
    methods: options.Methods = ("none", "linear", "ntk", "dynamic", "llama3", "ntk-by-parts", "yarn"),
    factors: options.Factors = (4,),
    **shared: Unpack[CompareOptions],
) -> "Reports":
    """Compare scaling methods by perplexity, or recall: `eval-ppl` with methods.

    Loads each model once and patches it in memory. With several checkpoints, tries every method on each.
    """
    return measure_documents(checkpoints, {"methods": methods, "factors": factors, **shared})
