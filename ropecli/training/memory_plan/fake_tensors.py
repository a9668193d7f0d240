"""Counts the bytes of live tensors during a pass on tensors without storage, and gives the pass its attention.

The pass is the model's own forward and backward under torch's FakeTensorMode, which knows shapes, dtypes and what
autograd keeps, and computes nothing. What an operation holds for itself while it runs is not seen.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ropecli.attention.attention_function import make_kernel
from ropecli.config.saved_remapping import method_of
from ropecli.training.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OUTSIDE = -1
"""The owner of what no layer of the decoder made."""
_ATTENTION = "ropecli-memory-plan"
_ROWS = 256
"""Queries of the one block that is gone through: the most that a block has (ropecli/attention/)."""


class AllocationCounter(TorchDispatchMode):
    """now: bytes alive; peak: the most since it was last set. owner: who makes the tensors that are made now.

    Storages that were there before the counter was opened are not in it.
    """

    def __init__(self, before: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self.owner = OUTSIDE
        self._alive: dict[int, tuple[int, int]] = {}
        self._before = {tensor.untyped_storage()._cdata for tensor in before}

    def owned(self) -> dict[int, int]:
        """Bytes alive by owner."""
        sums: dict[int, int] = {}
        for size, owner in self._alive.values():
            sums[owner] = sums.get(owner, 0) + size
        return sums

    def restart(self) -> None:
        """Forgets the peak so far."""
        self.peak = self.now

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._grouped_mm.default:
            result: Any = _grouped_product(*args)
        else:
            result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor)
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive or key in self._before:
            return
        self._alive[key] = (storage.nbytes(), self.owner)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self._alive.pop(key)[0]


def _grouped_product(left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor, *_: Any) -> torch.Tensor:
    """The shape of a mixture's product, expert by expert: torch 2.13's own rule takes bfloat16 alone."""
    rows = (len(offsets),) if left.ndim == right.ndim == 2 else ()
    return left.new_empty(*rows, left.shape[-2], right.shape[-1])


def attend_as_in_training(model: "PreTrainedModel", recipe: Recipe) -> None:
    """The recipe's attention, and its masks of tokens × tokens where there are such in training.

    transformers makes one when it meets tensors without values, in which it cannot see whether documents are packed.
    Of causal attention alone SDPA needs none; others than SDPA and eager, as flash attention, never do. Their kernels
    may not be here, and keep as much as SDPA's. The methods' own attention is the one for a CPU, a block at a time.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    attention = model.config._attn_implementation if recipe.attn == "auto" else recipe.attn
    if attention == "eager":
        model.set_attn_implementation("eager")
        return
    own = model.config.get_text_config()._attn_implementation
    packed = any(source.sequences == "packed" for source in recipe.sources)

    def mask(**arguments: Any) -> Any:
        return sdpa_mask(**{**arguments, "allow_is_causal_skip": not packed}) if attention == "sdpa" else None

    AttentionInterface.register(_ATTENTION, _in_one_block(own) if method_of(own) else sdpa_attention_forward)
    AttentionMaskInterface.register(_ATTENTION, mask)
    model.set_attn_implementation(_ATTENTION)


def _in_one_block(name: str) -> Callable[..., Any]:
    """The attention of a relative-position method, for the last queries alone, which see the most keys.

    Block after block takes the same memory, and at 100,000 tokens there are 10,000 blocks. name: of the attention.
    """

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        kernel = make_kernel(module, name, sliding_window)
        first = max(query.shape[2] - _ROWS, 0)
        last = kernel(
            query[:, :, first:],
            key,
            value,
            first_query=first,
            first_key=0,
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
            softcap=softcap,
            sinks=s_aux,
            dropout=dropout,
        )
        before = last.new_empty(*last.shape[:2], first, last.shape[-1])
        return torch.cat((before, last), 2).transpose(1, 2).contiguous(), None

    return attend
