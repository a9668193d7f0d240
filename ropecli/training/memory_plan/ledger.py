"""Counts the bytes of tensors that are alive, at every operation, of work that is done on tensors without storage.

The work is the real one: the model's own forward and backward pass under torch's FakeTensorMode, which knows shapes,
dtypes and what autograd keeps, and computes nothing. What an operation holds for itself while it runs is not seen.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

OUTSIDE = -1
"""The owner of what no layer of the decoder made."""


class Ledger(TorchDispatchMode):
    """now: bytes alive; peak: the most since it was last set. owner: who makes the tensors that are made now.

    Storages that were there before the ledger was opened are not in it.
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
