"""An attention that records what a model's layers give it.

An attention function of transformers' interface, and a mask function beside it, take the place of the model's own for
a few passes.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ropecli.errors import PatchError
from ropecli.live.rotary import unpatched_after
from ropecli.live.stock_transformers import quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_NAME = "ropecli:layout"
# arguments that do not change the attention, or that the methods support
_UNDERSTOOD = {
    *("sliding_window", "softcap", "s_aux", "is_causal", "position_ids", "cache_position"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "use_cache", "deterministic"),
}


class AttentionCall(NamedTuple):
    """The arguments of one call of the attention function; query, key, value: shape (batch, heads, tokens, width)."""

    module: Any
    query: Tensor
    key: Tensor
    value: Tensor
    slides: bool

    @property
    def name(self) -> str:
        index = getattr(self.module, "layer_idx", None)
        own = type(self.module).__name__
        return own if index is None else f"Layer {index} ({own})"


class AttentionProbe:
    """An attention function that records its arguments, and a mask function whose mask it must receive."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []
        self._outputs: list[Tensor] = []
        self._replays = False
        self._causal: list[bool] = []  # whether each mask is plainly causal

    def replay(self) -> None:
        """Starts a second pass, in which each call returns the output of the same call of the first."""
        self._replays, self.calls, self._causal = True, [], []

    def mask(self, *, batch_size: int, mask_function: Any = None, **others: Any) -> Tensor:
        """The mask function. Its masks hold only a number, by which they are recognised."""
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
        """The attention function: causal attention, or what it was at the same call of the first pass."""
        slides = others.get("sliding_window") is not None
        if not self._replays:
            self._check(type(module).__name__, attention_mask, slides, others)
            self._outputs.append(causal_attention(query, key, value, scaling))
        elif len(self.calls) >= len(self._outputs):
            raise PatchError("How often the model attends depends on the positions.")
        output = self._outputs[len(self.calls)]
        self.calls.append(AttentionCall(module, query.clone(), key.clone(), value.clone(), slides))
        return output, None

    def _check(self, name: str, mask: Any, slides: bool, others: dict[str, Any]) -> None:
        """Raises PatchError for an attention (its module's name) that is not plain causal attention."""
        unknown = sorted(key for key, value in others.items() if value is not None and key not in _UNDERSTOOD)
        if unknown:
            raise PatchError(f"{name} calls its attention with arguments that are not supported: {unknown}.")
        if mask is None or mask.dtype != torch.int64 or mask.shape[1:] != (1, 1, 3) or mask.unique().numel() != 1:
            raise PatchError(f"{name} changes the mask on its way to the attention, as sparse attention does.")
        causal = self._causal[mask.flatten()[0]]
        if not (slides or causal):
            raise PatchError(f"{name} does not see the whole context, by its mask, and names no sliding_window.")
        if slides and causal:
            raise PatchError(f"{name} names a sliding_window, and sees the whole context, by its mask.")


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Causal attention; the output's shape is (batch, tokens, heads, width), as transformers expects it."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return output.transpose(1, 2).contiguous()


@contextlib.contextmanager
def attending_by(model: "PreTrainedModel", probe: Any) -> Iterator[None]:
    """The model attends by the probe, a callable with a mask function, in evaluation mode and without gradients.

    At the end the model is as it was.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_NAME, probe)
    AttentionMaskInterface.register(_NAME, probe.mask)
    try:
        with torch.no_grad(), quiet_transformers(), in_evaluation(model), unpatched_after(model):
            model.set_attn_implementation(_NAME)
            yield
    finally:
        # the interface registers for all models, but removes for one; this is where it registers
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(_NAME)


@contextlib.contextmanager
def in_evaluation(model: torch.nn.Module) -> Iterator[None]:
    training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was in training:
            module.training = was
