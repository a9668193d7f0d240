"""Record the arguments that a model's layers pass to their attention.

An attention function and a mask function for transformers' interfaces replace the model's own for a few passes.
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
# arguments that do not change the attention or that the methods support
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
        index, name = getattr(self.module, "layer_idx", None), type(self.module).__name__
        return name if index is None else f"Layer {index} ({name})"


class AttentionProbe:
    """An attention function that records its arguments, and a mask function whose mask it must receive."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []
        self._outputs: list[Tensor] = []
        self._replays = False
        self._causal: list[bool] = []  # whether each mask is exactly causal

    def replay(self) -> None:
        """Start a second pass, in which each call returns its output of the first pass."""
        self._replays, self.calls, self._causal = True, [], []

    def mask(self, *, batch_size: int, mask_function: Any = None, **unused: Any) -> Tensor:
        """The mask function. Each mask holds only a number that identifies it."""
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
        **arguments: Any,
    ) -> tuple[Tensor, None]:
        """The attention function: causal attention, or the output of the same call in the first pass."""
        slides = arguments.get("sliding_window") is not None
        if not self._replays:
            self._check(type(module).__name__, attention_mask, slides, arguments)
            self._outputs.append(causal_attention(query, key, value, scaling))
        elif len(self.calls) >= len(self._outputs):
            raise PatchError("The number of attention calls depends on the positions, which is not supported.")
        output = self._outputs[len(self.calls)]
        self.calls.append(AttentionCall(module, query.clone(), key.clone(), value.clone(), slides))
        return output, None

    def _check(self, name: str, mask: Any, slides: bool, arguments: dict[str, Any]) -> None:
        """Raise PatchError for anything other than standard causal attention. name: the module, for messages."""
        unknown = sorted(key for key, value in arguments.items() if value is not None and key not in _UNDERSTOOD)
        if unknown:
            raise PatchError(f"{name} passes unsupported arguments to its attention: {unknown}.")
        if mask is None or mask.dtype != torch.int64 or mask.shape[1:] != (1, 1, 3) or mask.unique().numel() != 1:
            raise PatchError(
                f"{name} changes the attention mask, which is not supported (sparse attention, for example)."
            )
        causal = self._causal[mask.flatten()[0]]
        if not (slides or causal):
            raise PatchError(f"{name} has a mask that hides part of the context, but no sliding_window.")
        if slides and causal:
            raise PatchError(f"{name} has a sliding_window, but its mask shows the whole context.")


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Causal attention. Returns shape (batch, tokens, heads, width), as transformers expects."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return output.transpose(1, 2).contiguous()


@contextlib.contextmanager
def attending_by(model: "PreTrainedModel", probe: Any) -> Iterator[None]:
    """Run the model with `probe` as its attention, in evaluation mode and without gradients; restore it at the end.

    probe: an attention function with a method `mask`, the mask function.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_NAME, probe)
    AttentionMaskInterface.register(_NAME, probe.mask)
    try:
        with torch.no_grad(), quiet_transformers(), in_evaluation(model), unpatched_after(model):
            model.set_attn_implementation(_NAME)
            yield
    finally:
        # the interface has no public way to unregister
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
