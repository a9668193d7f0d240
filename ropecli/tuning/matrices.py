"""Level 2: LoRA on the projections that give queries and keys, merged into them.

Source: Hu et al. 2021, arXiv:2106.09685.
"""

from typing import Any

import torch
from torch import Tensor

from ropecli.checkpoint.patch_plan import PatchPlan
from ropecli.errors import PatchError
from ropecli.training import adapters
from ropecli.training.recipe import make_recipe
from ropecli.training.target_modules import attention_projections, linear_modules
from ropecli.tuning.record import Score
from ropecli.tuning.run import Run, Tuned, finish_learned, train

_RATE = 3e-3
"""On the demo checkpoint 1e-3 learns less in as many steps, 1e-2 a little more; few sequences want a smaller one."""
_LETTERS = ("q", "k", "wq", "wk")
"""What the name of a projection of queries or keys begins with; fused ones too."""


def tune_matrices(run: Run, plan: PatchPlan, begun: Score) -> Tuned:
    """LoRA's matrices of the settings' rank, and 2 × rank for alpha. Raises PatchError for a model without such
    projections.
    """
    rank = run.settings.rank
    targets = tuple(dict.fromkeys(name.rpartition(".")[2] for name in projections_to_train(run.model)))
    keys = {"adapter": "lora", "lora_rank": rank, "lora_alpha": 2 * rank, "lora_targets": targets}
    required = {name: parameter.requires_grad for name, parameter in run.model.named_parameters()}
    adapters.attach(run.model, make_recipe(None, {"data": "calibration", "seed": run.settings.seed, **keys}))
    try:
        parameters = [parameter for _, parameter in adapters.trainable(run.model)]
        best, live = train(run, plan, begun, [parameters], (_RATE,))
    finally:  # the model is itself again, whatever ended the training
        merged = _unwrap(run.model)
        for name, parameter in run.model.named_parameters():
            parameter.requires_grad_(required[name])
    return finish_learned(run, plan, begun, best, live, merged)


def projections_to_train(model: Any) -> list[str]:
    """The modules that give queries and keys, by their names. Raises PatchError where there is none."""
    found = attention_projections(model, linear_modules(model))
    names = [name for name in found if name.rpartition(".")[2].lower().startswith(_LETTERS)]
    if not names:
        raise PatchError(f"{type(model).__name__} has no linear projection of queries or keys that LoRA could train.")
    return names


@torch.no_grad()
def _unwrap(model: Any) -> dict[str, Tensor]:
    """Takes the adapter out of the model again; the weights with it merged, by their names, float64."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    merged = {}
    wrapped: list[tuple[str, Any]] = [
        (name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)
    ]
    for name, module in wrapped:
        delta = module.get_delta_weight(adapters.ADAPTER)
        base = module.get_base_layer()
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, base)
        merged[f"{name}.weight"] = base.weight.detach().to("cpu", torch.float64) + delta.to("cpu", torch.float64)
    return merged
