"""Several scaling methods and factors on one model: the weights are loaded once, the rotary tables set in memory."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from ropecli.checkpoint.live import restored, rotary_tables, set_ropes
from ropecli.checkpoint.plan import PatchPlan, make_plan
from ropecli.checkpoint.reading import Checkpoint
from ropecli.data.documents import Documents
from ropecli.evaluate.perplexity import Row, evaluate_perplexity
from ropecli.rope import ScalingSpec
from ropecli.scaling.registry import scale, varies_with_length

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def plan_comparison(checkpoint: Checkpoint, specs: Iterable[ScalingSpec]) -> list[PatchPlan]:
    """A plan each, `none` once whatever the factors. Raises MethodError before anything is loaded."""
    wanted: list[ScalingSpec] = []
    for spec in specs:
        spec = ScalingSpec("none") if spec.method == "none" else spec
        if spec not in wanted:
            wanted.append(spec)
    return [make_plan(checkpoint, spec) for spec in wanted]


def switches(plan: PatchPlan) -> bool:
    """Whether any of the plan's ropes turn at other frequencies for other lengths."""
    return any(varies_with_length(rope.geometry, rope.spec) for rope in plan.ropes.values())


def live_patch(model: "PreTrainedModel", plan: PatchPlan) -> Callable[[int], None] | None:
    """Patches the model in memory as `plan` says; returns what must be called before passes of a given length.

    None where the frequencies do not switch with the length.
    """
    tables = rotary_tables(model)
    set_ropes(tables, plan.ropes)
    if not switches(plan):
        return None

    def at_length(length: int) -> None:
        ropes = {label: scale(rope.geometry, rope.spec, length) for label, rope in plan.ropes.items()}
        set_ropes(tables, ropes)

    return at_length


def compare_methods(
    model: "PreTrainedModel",
    plans: Sequence[PatchPlan],
    documents: Documents,
    lengths: Sequence[int],
    *,
    protocol: str = "prefix",
    advance: Callable[[], None] = lambda: None,
) -> list[list[Row]]:
    """Rows by length for each plan, in the plans' order. Leaves the model as it was."""
    results = []
    with restored(rotary_tables(model)):
        for plan in plans:
            before = live_patch(model, plan)
            results.append(
                evaluate_perplexity(model, documents, lengths, protocol=protocol, before_length=before, advance=advance)
            )
    return results
