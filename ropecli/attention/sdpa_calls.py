"""Attention by a model's own code: its calls of torch's scaled_dot_product_attention are seen, and answered."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
