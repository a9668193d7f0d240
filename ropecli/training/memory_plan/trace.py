"""Which bytes a pass through a decoder keeps and works with, found by making the pass on tensors without storage.

With gradient checkpointing a layer keeps its input alone, and everything else of one layer at a time is there in the
backward pass (Chen et al. 2016, arXiv:1604.06174); without it, what Korthikanti et al. 2022 (arXiv:2205.05198, section
4) add up by hand is here counted, whatever the architecture.
"""

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ropecli.errors import CheckpointError, RopecliError, reason_of
from ropecli.live.stock_transformers import quiet_transformers
from ropecli.training.adapters import attach, trainable
from ropecli.training.loss import enable_checkpointing
from ropecli.training.memory_plan.fake_tensors import OUTSIDE, AllocationCounter, attend_as_in_training
from ropecli.training.memory_plan.model_shape import ModelShape, build, keep_one_of_each, layers_of
from ropecli.training.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Trace:
    """Bytes of one forward and backward pass through the decoder, without weights, gradients and loss.

    kept: alive between the two. forward: what the forward pass holds at its end, and not any more after it (autocast's
    copies of weights). working: above kept, while the backward pass goes through the layers. embedding: above
    nothing, while it goes through the embeddings. hidden: the decoder's output, whose dtype has output_itemsize bytes.

    And numbers of values: trained; quantizable, of frozen matrices in layers; layer, of the largest layer; outside, of
    what is in no layer. head_trained: whether the head's matrix is.
    """

    kept: int
    forward: int
    working: int
    embedding: int
    hidden: int
    output_itemsize: int
    trained: int
    quantizable: int
    layer: int
    outside: int
    head_trained: bool
    embeddings_trained: bool


def trace(config: Any, shape: ModelShape, recipe: Recipe, length: int, dtype: torch.dtype = torch.float32) -> Trace:
    """dtype: of the weights, an adapter's own aside. Raises CheckpointError where the pass cannot be made so."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with quiet_transformers(), torch.device("meta"):
            model = build(_at_every_length(config), dtype)
            kinds = keep_one_of_each(model, shape.kinds)
            attach(model, recipe)
        with quiet_transformers(), FakeTensorMode(allow_non_fake_inputs=True):
            _move(model)
            attend_as_in_training(model, recipe)
            model.train()
            if recipe.gradient_checkpointing:
                enable_checkpointing(model)
            for _, parameter in trainable(model):
                parameter.grad = torch.empty_like(parameter)
            counts = [shape.kinds.count(kind) for kind in kinds]
            return _pass(model, recipe, length, counts)
    except RopecliError:
        raise
    except Exception as error:  # what a model does with its values, it cannot do without them
        raise CheckpointError(
            f"{config.model_type}: its training step cannot be followed without computing it: {reason_of(error)}"
        ) from error


def _at_every_length(config: Any) -> Any:
    """A copy whose positions turn alike at all lengths: to ask for the longest is to ask for values."""
    config = copy.deepcopy(config)
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    for one in [parameters, *parameters.values()]:
        if isinstance(one, dict) and "rope_type" in one:
            one["rope_type"] = "default"
    return config


def _move(model: "PreTrainedModel") -> None:
    """From the meta device to tensors that say they are on a CPU: some models ask. Tied ones stay tied."""
    moved: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in moved:
                    fresh = torch.empty_like(parameter, device="cpu")
                    moved[id(parameter)] = torch.nn.Parameter(fresh, requires_grad=parameter.requires_grad)
                module._parameters[name] = moved[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")


def _pass(model: "PreTrainedModel", recipe: Recipe, length: int, counts: list[int]) -> Trace:
    decoder: Any = model.base_model if model.base_model is not model else getattr(model, "model", model)
    ids = torch.zeros(recipe.batch_size, length, dtype=torch.long)
    gradients = [parameter.grad for _, parameter in trainable(model) if parameter.grad is not None]
    counter = AllocationCounter([*model.parameters(), *model.buffers(), *gradients, ids])
    _name_owners(model, counter)
    if recipe.gradient_checkpointing:
        _hold_outputs(model)
    layers_done = _PeakOfLayers()
    with counter:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=recipe.mixed_precision == "bf16"):
            handle = model.get_input_embeddings().register_forward_hook(layers_done.register(counter))
            hidden = decoder(input_ids=ids, use_cache=False).last_hidden_state
            handle.remove()
            within = counter.owned()
        after = counter.owned()
        size, itemsize = hidden.numel() * hidden.element_size(), hidden.element_size()
        before = counter.now
        counter.restart()
        gradient = torch.empty_like(hidden)
        if not hidden.requires_grad:
            raise CheckpointError(f"{type(model).__name__}: nothing that is trained leads to its output.")
        hidden.backward(gradient, inputs=[parameter for _, parameter in trainable(model)])
        at_layers = layers_done.peak or counter.peak
        at_embeddings = counter.peak if layers_done.peak else 0
    kept = _scaled(after, counts)
    return Trace(
        kept=kept,
        forward=_scaled(within, counts) - kept,
        working=at_layers - before,
        embedding=at_embeddings,
        hidden=size,
        output_itemsize=itemsize,
        **_values(model, counts),
    )


def _values(model: "PreTrainedModel", counts: list[int]) -> dict[str, Any]:
    layers = layers_of(model)[2]
    times = {id(one): count for layer, count in zip(layers, counts, strict=True) for one in layer.parameters()}
    trained = [parameter for _, parameter in trainable(model)]
    matrices = [m.weight for layer in layers for m in layer.modules() if isinstance(m, torch.nn.Linear)]
    head = model.get_output_embeddings()
    return {
        "trained": sum(one.numel() * times.get(id(one), 1) for one in trained),
        "quantizable": sum(one.numel() * times[id(one)] for one in matrices if not one.requires_grad),
        "layer": max(sum(one.numel() for one in layer.parameters()) for layer in layers),
        "outside": sum(one.numel() for one in model.parameters() if id(one) not in times),
        "head_trained": head is not None and head.weight.requires_grad,
        "embeddings_trained": model.get_input_embeddings().weight.requires_grad,
    }


class _PeakOfLayers:
    """Notes the peak when the backward pass has come through all layers, and begins it anew."""

    def __init__(self) -> None:
        self.peak = 0

    def register(self, counter: AllocationCounter) -> Any:
        def reached(gradient: torch.Tensor) -> None:
            self.peak = counter.peak
            counter.restart()

        def hook(module: Any, arguments: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(reached)

        return hook


def _name_owners(model: "PreTrainedModel", counter: AllocationCounter) -> None:
    """Tensors made in the forward pass belong to the layer that made them."""
    for index, layer in enumerate(layers_of(model)[2]):
        layer.register_forward_pre_hook(_owner(counter, index))
        layer.register_forward_hook(_owner(counter, OUTSIDE))


def _hold_outputs(model: "PreTrainedModel") -> None:
    """Until the gradient comes to it: a layer's output is what the next layer keeps, and here there may be none."""
    held: dict[int, torch.Tensor | None] = {}

    def hook(layer: Any, arguments: Any, output: Any) -> None:
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        if torch.is_grad_enabled() and hidden.requires_grad and id(layer) not in held:
            held[id(layer)] = hidden
            hidden.register_hook(lambda gradient: held.update({id(layer): None}))

    for layer in layers_of(model)[2]:
        layer.register_forward_hook(hook)


def _owner(counter: AllocationCounter, owner: int) -> Any:
    def hook(*_: Any) -> None:
        counter.owner = owner

    return hook


def _scaled(owned: dict[int, int], counts: list[int]) -> int:
    """Bytes of the whole depth: each layer stands for all of its kind."""
    return owned.get(OUTSIDE, 0) + sum(count * owned.get(index, 0) for index, count in enumerate(counts))
