"""An attention that records what a model's layers give it; what attends by torch's function directly is recorded too.

An attention function of transformers' interface, and a mask function beside it, take the place of the model's own for
a few passes. Code that calls scaled_dot_product_attention by itself is answered there.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ropecli.errors import PatchError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_NAME = "ropecli:layout"
# what models hand to an attention function that does not change the attention, or that the methods compute too
_UNDERSTOOD = {
    *("sliding_window", "softcap", "s_aux", "is_causal", "position_ids", "cache_position"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "use_cache", "deterministic"),
}


class AttentionCall(NamedTuple):
    """What one layer gave its attention function; query, key and value: shape (batch, heads, tokens, width)."""

    module: Any
    query: Tensor
    key: Tensor
    value: Tensor
    slides: bool


class AttentionProbe:
    """An attention function that keeps what it gets, and a mask function whose mask it must get."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []
        self._given: list[Tensor] = []  # outputs, by call
        self._replays = False
        self._causal: list[bool] = []  # of each mask, whether it is causal and no more

    def replaying(self) -> "AttentionProbe":
        self._replays, self.calls, self._causal = True, [], []
        return self

    def mask(self, *, batch_size: int, mask_function: Any = None, **others: Any) -> Tensor:
        """The mask function. Its masks carry no mask but a number, by which they are known where they arrive."""
        from transformers.masking_utils import causal_mask_function

        number = len(self._causal)
        self._causal.append(mask_function is causal_mask_function)
        return torch.full((batch_size, 1, 1, 3), number)

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        dropout: float = 0.0,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """The attention function."""
        slides = others.get("sliding_window") is not None
        if not self._replays:
            self._check(module, query, key, attention_mask, slides, others)
        return self.keep(module, query, key, value, scaling, slides)

    def keep(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, slides: bool = False
    ) -> tuple[Tensor, None]:
        """Causal attention, or what it was at the same call of the first pass."""
        if not self._replays:
            self._given.append(causal_attention(query, key, value, scaling))
        elif len(self.calls) >= len(self._given):
            raise PatchError("How often the model attends depends on the positions.")
        output = self._given[len(self.calls)]
        self.calls.append(AttentionCall(module, query.clone(), key.clone(), value.clone(), slides))
        return output, None

    def _check(self, module: Any, query: Tensor, key: Tensor, mask: Any, slides: bool, others: dict[str, Any]) -> None:
        name = type(module).__name__
        unknown = sorted(key for key, value in others.items() if value is not None and key not in _UNDERSTOOD)
        if unknown:
            raise PatchError(f"{name} wants of its attention what no other function than its own gives: {unknown}.")
        if others.get("is_causal") is False or not getattr(module, "is_causal", True):
            raise PatchError(f"{name} attends in both directions; distances are remapped in causal attention alone.")
        if query.shape[2] != key.shape[2]:
            raise PatchError(f"{name} has {key.shape[2]} keys for {query.shape[2]} queries: not causal self-attention.")
        if mask is None:
            raise PatchError(f"{name} gives its attention function no mask: padding would be attended to.")
        if mask.dtype != torch.int64 or mask.shape[1:] != (1, 1, 3) or mask.unique().numel() != 1:
            raise PatchError(f"{name} changes the mask on its way to the attention, as sparse attention does.")
        causal = self._causal[mask.flatten()[0]]
        if not (slides or causal):
            raise PatchError(f"{name} does not see the whole context, by its mask, and names no sliding_window.")
        if slides and causal:
            raise PatchError(f"{name} names a sliding_window, and sees the whole context, by its mask.")


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Causal attention; the output's shape is (batch, tokens, heads, width), as transformers wants it."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return output.transpose(1, 2).contiguous()


@contextlib.contextmanager
def attending_by(model: "PreTrainedModel", probe: Any, own_code: bool = False) -> Iterator[None]:
    """The model's attention is the probe's, a callable with a mask function; at the end what it was.

    own_code: where a model attends by code of its own, the probe's `keep` is its attention (see answering_sdpa).
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    before, unset = _implementations(model.config), _unset(model.config)
    AttentionInterface.register(_NAME, probe)
    AttentionMaskInterface.register(_NAME, probe.mask)
    try:
        model.set_attn_implementation(_NAME)
        by_code = own_code and model.config.get_text_config()._attn_implementation != _NAME
        with answering_sdpa(model, probe.keep) if by_code else contextlib.nullcontext():
            yield
    finally:
        model.set_attn_implementation(before)
        for part in unset:
            part._attn_implementation = None
        # the interface registers for all models, and takes away for one; this is where it registers
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(_NAME)


@contextlib.contextmanager
def answering_sdpa(model: "PreTrainedModel", attention: Callable[..., tuple[Tensor, None]]) -> Iterator[None]:
    """Every such call is this function's, of a module, query, key, value and scale; at the end as before.

    Code that chooses by the config takes the branch of sdpa. What is computed by hand is not seen.
    """
    running: list[torch.nn.Module] = []

    def enter(module: torch.nn.Module, arguments: Any) -> None:
        running.append(module)

    def leave(module: torch.nn.Module, arguments: Any, output: Any) -> None:
        running.pop()

    config: Any = model.config
    before, handles = config._attn_implementation, []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        config._attn_implementation = "sdpa"
        with _AnsweringSdpa(attention, running):
            yield
    finally:
        config._attn_implementation = before
        for handle in handles:
            handle.remove()


class _AnsweringSdpa(TorchFunctionMode):
    """running: the modules whose forward pass runs, the innermost last: it is the one that attends."""

    def __init__(self, attention: Callable[..., tuple[Tensor, None]], running: list[torch.nn.Module]) -> None:
        super().__init__()
        self._attention, self._running = attention, running

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = self._answer if func is torch.nn.functional.scaled_dot_product_attention else func
        return answer(*args, **(kwargs or {}))

    def _answer(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        output, _ = self._attention(self._running[-1], query, key, value, scale)
        return output.transpose(1, 2)


def _implementations(config: Any) -> Any:
    """The attention of a config and of its parts, as set_attn_implementation takes them."""
    found = {key: _implementations(part) for key, part in _parts(config).items()}
    known = {key: value for key, value in found.items() if value is not None}
    return {"": config._attn_implementation, **known} if known else config._attn_implementation


def _unset(config: Any) -> list[Any]:
    """The parts that name no attention, as where no model is made of them; set_attn_implementation takes no None."""
    parts = _parts(config).values()
    return [part for part in parts if part._attn_implementation is None] + [
        one for part in parts for one in _unset(part)
    ]


def _parts(config: Any) -> dict[str, Any]:
    return {key: part for key in config.sub_configs if (part := getattr(config, key, None)) is not None}


@contextlib.contextmanager
def in_evaluation(model: torch.nn.Module) -> Iterator[None]:
    training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was in training:
            module.training = was
