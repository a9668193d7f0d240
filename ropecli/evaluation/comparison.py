"""Compare scaling methods and factors on one model, loaded once and patched in memory for each of them."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ropecli.attention.patching import live_patch
from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.patch_plan import PatchPlan, make_plan
from ropecli.data.documents import Documents
from ropecli.evaluation.perplexity import evaluate_perplexity
from ropecli.evaluation.results import LengthResult
from ropecli.live.rotary import unpatched_after
from ropecli.scaling.none import LENGTH_ONLY
from ropecli.scaling.scale import varies_with_length
from ropecli.scaling.spec import ScalingSpec, make_spec

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def plan_comparison(checkpoint: Checkpoint, specs: Iterable[ScalingSpec | None]) -> list[PatchPlan | None]:
    """One plan per distinct spec; None for the unchanged checkpoint.

    Methods that scale nothing appear once. Raises MethodError.
    """
    wanted: list[ScalingSpec | None] = []
    for spec in specs:
        spec = make_spec(spec.method.name) if spec and spec.method.name in LENGTH_ONLY else spec
        if spec not in wanted:
            wanted.append(spec)
    return [make_plan(checkpoint, spec) if spec else None for spec in wanted]


def plan_varies_with_length(plan: PatchPlan) -> bool:
    """Return whether the frequencies of any rope in the plan depend on the length."""
    return any(varies_with_length(rope) for rope in plan.ropes.values())


def compare_methods(
    model: "PreTrainedModel",
    plans: Sequence[PatchPlan | None],
    documents: Documents,
    lengths: Sequence[int],
    *,
    part: str = "",
    **options: Any,
) -> list[list[LengthResult]]:
    """Measure perplexity for each plan. Returns one list of results by length per plan, in the plans' order.

    plans: None is the unchanged model. part, options: passed to evaluate_perplexity; the plan's index is added to
    `part`. Raises PatchError if the model does not support one of the plans, before anything is measured.
    """
    for patch in filter(None, plans):
        with unpatched_after(model):
            live_patch(model, patch.ropes)
    results = []
    for index, plan in enumerate(plans):
        with unpatched_after(model):
            if plan:
                live_patch(model, plan.ropes)
            own: dict[str, Any] = {
                "switching": plan is not None and plan_varies_with_length(plan),
                "part": f"{part}{index}",
            }
            results.append(evaluate_perplexity(model, documents, lengths, **own, **options))
    return results
