"""The levels of tuning that learn weights: gains of the attention heads, and LoRA on queries and keys.

Level `heads`: a complex gain for every query head and rotary pair, and one temperature. Both dimensions of a pair are
rotated by a phase and multiplied by a gain. That commutes with the rotation by positions, so that it may happen before
it: in the rows of the projection that gives the queries. An attention temperature is a gain that all pairs share, as
YaRN's attention factor is. Where a norm gives the queries, its weight can hold gains, and no phases.

Level `lora`: LoRA on the projections that give queries and keys, merged into them. Source: Hu et al. 2021
(arXiv:2106.09685).
"""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ropecli.checkpoint.patch_plan import PatchPlan
from ropecli.errors import PatchError
from ropecli.training import adapters
from ropecli.training.recipe import make_recipe
from ropecli.training.target_modules import attention_projections, linear_modules
from ropecli.tuning.folding import find_queries
from ropecli.tuning.tune_report import LayerGains, Score
from ropecli.tuning.tuning_run import Tuned, TuningRun, finish_learned, train

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_SAME = 1e-4
_HEADS_RATES = (0.03, 0.003)
"""Of gains and phases, and of the temperature."""
_LORA_RATE = 3e-3
"""On the demo checkpoint 1e-3 learns less in as many steps, 1e-2 a little more; few sequences want a smaller one."""
_PREFIXES = ("q", "k", "wq", "wk")
"""What the name of a projection of queries or keys begins with; fused ones too."""


def tune_heads(run: TuningRun, plan: PatchPlan, start: Score) -> Tuned:
    """Raises PatchError where nothing could be folded."""
    gains = HeadGains(run.model, plan.scaled)
    groups = [[*gains.log_gain, *(phase for phase in gains.phase if phase.numel())], [gains.log_temperature]]
    with gains.live(run.model):
        best, live = train(run, plan, start, groups, _HEADS_RATES)
    learned = {"gains": gains.as_record(), "log_temperature": float(gains.log_temperature.detach())}
    return finish_learned(run, plan, start, best, live, gains.folded(run.model), **learned)


class HeadGains(nn.Module):
    """Parameters by layer, all zero at first, where nothing changes; float32.

    log_gain, phase: shape (heads, pairs), or (1, pairs) where all heads share one norm; phase is empty for norms.
    log_temperature: of all layers.
    """

    def __init__(self, model: "PreTrainedModel", labels: Sequence[str | None]) -> None:
        """For the layers that rotate by the ropes of these labels. Raises PatchError where nothing could be folded."""
        super().__init__()
        self.queries, device = find_queries(model, labels), model.device
        self._offsets = [0.0 if one.projection else _offset(model.get_submodule(one.name)) for one in self.queries]
        shapes = [self._rows(layer).shape[1:] for layer in range(len(self.queries))]
        self.log_gain = nn.ParameterList(torch.zeros(shape, device=device) for shape in shapes)
        self.phase = nn.ParameterList(
            torch.zeros(shape if one.projection else (0, 0), device=device)
            for one, shape in zip(self.queries, shapes, strict=True)
        )
        self.log_temperature = nn.Parameter(torch.zeros((), device=device))

    def rotated(self, layer: int, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """A pair's two dimensions with the layer's gains and phases; shape (..., heads, pairs), float32 or more."""
        cos, sin = (one.to(first) for one in self._factors(self.log_gain[layer], self.phase[layer]))
        return _rotate(first, second, cos, sin)

    def as_record(self) -> tuple[LayerGains, ...]:
        return tuple(
            LayerGains(one.name, self.log_gain[layer].tolist(), self.phase[layer].tolist())
            for layer, one in enumerate(self.queries)
        )

    @contextlib.contextmanager
    def live(self, model: "PreTrainedModel") -> Iterator[None]:
        """The model attends with them; gradients reach them."""
        handles = [
            model.get_submodule(one.name).register_forward_hook(self._hook(layer))
            for layer, one in enumerate(self.queries)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, layer: int) -> Any:
        rows = self._rows(layer)

        def after(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
            at = rows.to(output.device)
            wide = torch.promote_types(output.dtype, torch.float32)
            first, second = self.rotated(layer, output[..., at[0]].to(wide), output[..., at[1]].to(wide))
            changed = output.clone()
            changed[..., at[0]], changed[..., at[1]] = first.to(output.dtype), second.to(output.dtype)
            return changed

        return after

    @torch.no_grad()
    def folded(self, model: "PreTrainedModel") -> dict[str, Tensor]:
        """The parameters of the model that hold them then, by name, float64, on the CPU: weights and biases."""
        changed: dict[str, Tensor] = {}
        for layer, one in enumerate(self.queries):
            for name, parameter in model.get_submodule(one.name).named_parameters(recurse=False):
                values = parameter.detach().to("cpu", torch.float64)
                offset = self._offsets[layer] if name == "weight" else 0.0
                # a projection has its rows first; a norm has nothing else, or the heads before them
                by_row = (values + offset).movedim(0 if one.projection else -1, 0)
                folded = self._fold(layer, by_row).movedim(0, 0 if one.projection else -1)
                changed[f"{one.name}.{name}"] = folded - offset
        return changed

    def _fold(self, layer: int, values: Tensor) -> Tensor:
        """values: shape (rows, ...). The two rows of each pair, rotated and multiplied."""
        rows = self._rows(layer)
        shape = (*rows.shape[1:], *[1] * (values.ndim - 1))
        log_gain, phase = (one[layer].double().cpu() for one in (self.log_gain, self.phase))
        cos, sin = (one.reshape(shape) for one in self._factors(log_gain, phase))
        folded = values.clone()
        folded[rows[0]], folded[rows[1]] = _rotate(values[rows[0]], values[rows[1]], cos, sin)
        return folded

    def _rows(self, layer: int) -> Tensor:
        """Shape (2, heads, pairs); of a norm that all heads go through one by one, (2, 1, pairs)."""
        one = self.queries[layer]
        return one.rows[:, :1] if one.shared else one.rows

    def _factors(self, log_gain: Tensor, phase: Tensor) -> tuple[Tensor, Tensor]:
        """gain·cos and gain·sin of the phases, in their shape and precision."""
        gain = torch.exp(log_gain + self.log_temperature.to(log_gain))
        phase = phase if phase.numel() else torch.zeros_like(gain)
        return gain * phase.cos(), gain * phase.sin()


def _rotate(first: Tensor, second: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return cos * first - sin * second, sin * first + cos * second


@torch.no_grad()
def _offset(norm: nn.Module) -> float:
    """What the norm adds to its weight before it multiplies by it: 1 in Gemma's, 0 in most. Raises PatchError."""
    trial: Any = copy.deepcopy(norm).to("cpu", torch.float32)
    states = torch.linspace(-1, 2, trial.weight.numel()).reshape(trial.weight.shape)
    bias = getattr(trial, "bias", None)
    given = []
    for value in (0.0, 1.0, 2.0):
        trial.weight.fill_(value)
        with contextlib.suppress(RuntimeError, TypeError):  # it takes no states alone, or of another shape
            given.append(trial(states).float() - (0.0 if bias is None else bias))
    for offset in (0.0, 1.0):
        # each gives as often what it has normalised as its weight and the offset make together
        each = [(value + offset) * (given[1] - given[0]) for value in range(3)] if len(given) == 3 else []
        if each and all(torch.allclose(*pair, atol=_SAME) for pair in zip(given, each, strict=True)):
            return offset
    raise PatchError(f"{type(norm).__name__} is a norm of its own kind; gains cannot be folded into its weight.")


def tune_lora(run: TuningRun, plan: PatchPlan, start: Score) -> Tuned:
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
        best, live = train(run, plan, start, [parameters], (_LORA_RATE,))
    finally:  # the model is itself again, whatever ended the training
        merged = _unwrap(run.model)
        for name, parameter in run.model.named_parameters():
            parameter.requires_grad_(required[name])
    return finish_learned(run, plan, start, best, live, merged)


def projections_to_train(model: Any) -> list[str]:
    """The modules that give queries and keys, by their names. Raises PatchError where there is none."""
    found = attention_projections(model, linear_modules(model))
    names = [name for name in found if name.rpartition(".")[2].lower().startswith(_PREFIXES)]
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
