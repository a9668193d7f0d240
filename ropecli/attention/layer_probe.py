"""Find what each layer of a model does with positions, by running a small model of the same architecture.

Each layer runs by itself on the hidden states of a first pass. It rotates if its output changes with the rotary table.
It sees the tokens whose hidden states have a gradient.
"""

import contextlib
import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ropecli.checkpoint.patch_plan import PatchPlan
from ropecli.config.layers import CHUNKED, FULL, OTHER, RECURRENT, SLIDING, SPARSE, WINDOWS, Layer, no_effect
from ropecli.errors import CheckpointError, PatchError, reason_of
from ropecli.live.devices import probe_ids
from ropecli.live.rotary import rotary_tables
from ropecli.live.skeleton import decoder_layers, make_small_model
from ropecli.live.stock_transformers import stock_config_of
from ropecli.names import LENGTH_ONLY

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOKENS = 64
_WINDOW = 12
"""Tokens. Windows of the config are shortened to it."""
_ORDER = 1e-5
"""Attention without positions gives the same output in any order of earlier tokens, within this share of it."""


def probe_layers(config: Any) -> tuple[Layer, ...]:
    """The layers of a model, in order. config: as read by transformers. Raises CheckpointError if it cannot be run."""
    if getattr(config, "canvas_length", None):
        raise CheckpointError(
            f"A model of type {config.model_type} writes on a canvas that sees all of itself, so running a small one "
            "does not show the windows of its layers."
        )
    config = copy.deepcopy(config)
    windows: dict[str, int] = {}
    try:
        for part in (config, config.get_text_config()):
            if getattr(part, "num_kv_shared_layers", None):
                part.num_kv_shared_layers = 0  # each layer runs by itself
            for kind, keys in WINDOWS.items():
                for key in keys:
                    if isinstance(value := getattr(part, key, None), int) and value > 0:
                        windows.setdefault(kind, value)
                        setattr(part, key, min(_WINDOW, value))
        model, places = make_small_model(config)
        calls = _calls(model)
        small_layers = [_layer(call, ropes) for call, ropes in zip(calls, _ropes(model, calls), strict=True)]
    except Exception as error:  # model classes raise many kinds of errors
        raise CheckpointError(f"A small model of type {config.model_type} cannot be run: {reason_of(error)}") from error
    layers = [small_layers[place] for place in places]
    return tuple(layer._replace(window=windows.get(layer.attention or "")) for layer in layers)


def refuse_without_effect(plan: PatchPlan) -> None:
    """Raise PatchError if a small model shows that no layer that sees the whole context has rotary positions."""
    if plan.spec.method.name in LENGTH_ONLY:
        return
    try:
        layers = probe_layers(stock_config_of(plan.original, plan.source.name))
    except CheckpointError:  # the proof says what transformers cannot read
        return
    if not any(layer.far and layer.rotates for layer in layers):
        effect = no_effect(layers, plan.spec.method)
        raise PatchError(f"{plan.source.name}: a small model of its type shows that {effect}")


class _Call(NamedTuple):
    """A layer with the arguments of one call."""

    layer: nn.Module
    args: tuple[Any, ...]
    named: dict[str, Any]

    @property
    def hidden(self) -> Tensor:
        return (self.args[0] if self.args else self.named["hidden_states"]).detach()

    def on(self, hidden: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other hidden states."""
        return ((hidden, *self.args[1:]), self.named) if self.args else ((), {**self.named, "hidden_states": hidden})

    def output(self, hidden: Tensor) -> Tensor:
        args, named = self.on(hidden)
        output = self.layer(*args, **named)
        return output[0] if isinstance(output, tuple) else output


@torch.no_grad()
def _calls(model: "PreTrainedModel", like: Sequence[_Call] = ()) -> list[_Call]:
    """The call of each layer in a pass over the model. like: calls whose hidden states to use."""
    calls: list[_Call] = []

    def before(layer: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        calls.append(_Call(layer, args, named))
        return calls[-1].on(like[len(calls) - 1].hidden) if like else (args, named)

    with contextlib.ExitStack() as hooks:
        for layer in decoder_layers(model):
            hooks.callback(layer.register_forward_pre_hook(before, with_kwargs=True).remove)
        model(input_ids=probe_ids(model, _TOKENS), use_cache=False)
    if len(calls) != len(decoder_layers(model)):
        raise CheckpointError(f"{type(model).__name__} does not run each of its layers once.")
    return calls


@torch.no_grad()
def _ropes(model: "PreTrainedModel", calls: Sequence[_Call]) -> list[set[str | None]]:
    """The layer types of the tables with which each layer's output changes."""
    before = [call.output(call.hidden) for call in calls]
    ropes: list[set[str | None]] = [set() for _ in calls]
    for table in rotary_tables(model):
        table.refuse_if_computed()
        with table.changed():
            for number, changed in enumerate(_calls(model, calls)):
                if not torch.equal(changed.output(calls[number].hidden), before[number]):
                    ropes[number].add(table.layer_type)
    return ropes


def _layer(call: _Call, ropes: set[str | None]) -> Layer:
    last, earlier = _seen(call, _TOKENS - 1), _seen(call, _TOKENS - 4)
    if last == [_TOKENS - 1]:
        return Layer(OTHER, rotates=False, far=False)
    rope = min(ropes, key=str) if ropes else None
    if last == list(range(_TOKENS)):
        recurrent = not ropes and _orders(call)
        return Layer(RECURRENT if recurrent else FULL, bool(ropes), not recurrent, rope)
    if last != list(range(last[0], _TOKENS)):
        return Layer(SPARSE, bool(ropes), far=True, rope=rope)
    if not ropes and len(last) != _WINDOW and last[0] != earlier[0]:
        return Layer(RECURRENT, rotates=False, far=False)  # a convolution
    return Layer(CHUNKED if last[0] == earlier[0] else SLIDING, bool(ropes), far=False, rope=rope)


def _seen(call: _Call, query: int) -> list[int]:
    """The tokens up to `query` on which the layer's output at `query` depends."""
    hidden = call.hidden.clone().requires_grad_()
    output = _by_token(call.output(hidden))[query]
    (output * torch.linspace(0.5, 1.5, len(output))).sum().backward()
    assert hidden.grad is not None
    return [at for at in _by_token(hidden.grad).abs().sum(1).nonzero().flatten().tolist() if at <= query]


@torch.no_grad()
def _orders(call: _Call) -> bool:
    """Whether the last output depends on the order of earlier tokens."""
    order = [*reversed(range(_TOKENS - 1)), _TOKENS - 1]
    reordered = call.hidden.index_select(call.hidden.shape.index(_TOKENS), torch.tensor(order))
    outputs = [_by_token(call.output(hidden))[-1] for hidden in (call.hidden, reordered)]
    return bool((outputs[0] - outputs[1]).abs().max() > _ORDER * outputs[0].abs().max())


def _by_token(hidden: Tensor) -> Tensor:
    """Shape (tokens, values): models with several residual streams have one more dimension, first or last but one."""
    return hidden.movedim(hidden.shape.index(_TOKENS), 0).flatten(1)
