"""The left padding of each row of a batch and the start of its queries and keys, passed instead of a mask.

Refuses cases that would give wrong results silently: packed documents, other masks, padding between tokens.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ropecli.errors import PatchError


class RowPadding(NamedTuple):
    """padding: number of padding tokens on the left. query, key: index of the first query and first key of a pass."""

    padding: int
    query: int
    key: int


@torch.compiler.disable
def describe_padding(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **unused: Any,
) -> Tensor:
    """Mask function for transformers' AttentionMaskInterface that returns each row's padding instead of a mask.

    Returns shape (batch, 1, 1, 3), int64: transformers passes on masks of four dimensions unchanged. It is on the CPU,
    so that reading it does not wait for the device. Raises PatchError if the mask is not causal with padding at the
    ends.
    """
    first = int(q_offset)
    if use_vmap:
        raise PatchError("The model adds its own attention mask, which distance methods do not support.")
    # models also build the mask of sliding layers if they have none; it may hide everything
    if mask_function is not None and local_size is None:
        _refuse_other_masks(mask_function, batch_size, range(first, first + q_length), kv_offset, device)
    paddings = [0] * batch_size if attention_mask is None else _left_paddings(attention_mask, first + q_length)
    rows = [RowPadding(padding, first, kv_offset) for padding in paddings]
    return torch.tensor(rows, device="cpu")[:, None, None]


def read_padding(described: Tensor | None) -> list[RowPadding]:
    """Read the rows that describe_padding returned instead of a mask. Raises PatchError for any other mask."""
    if described is None or described.dtype != torch.int64 or described.shape[1:] != (1, 1, 3):
        received = "no mask" if described is None else f"a mask of shape {tuple(described.shape)}"
        raise PatchError(
            f"The attention received {received}; distance methods require the causal mask that transformers makes from "
            "a padding mask of shape (batch, tokens)."
        )
    return [RowPadding(*row) for row in described[:, 0, 0].tolist()]


def _left_paddings(mask: Tensor, tokens: int) -> list[int]:
    """Left padding of each row. mask: shape (batch, tokens or more), true for tokens. Raises PatchError."""
    if mask.shape[1] < tokens:
        raise PatchError(
            f"The attention mask has {mask.shape[1]} tokens; expected {tokens}, including those in the KV cache."
        )
    mask = mask[:, :tokens].to(torch.int64)
    first, last = mask.argmax(1), tokens - 1 - mask.flip(1).argmax(1)
    counts = mask.sum(1)
    if bool(((counts != last - first + 1) & (counts > 0)).any()):
        raise PatchError("The attention mask has padding between tokens; distance methods support it only at the ends.")
    return torch.where(counts > 0, first, tokens).tolist()


def _refuse_other_masks(
    mask_function: Callable[..., Any], batch: int, places: range, first_key: int, device: torch.device | str
) -> None:
    """Refuse masks in which a token does not see the one before it or sees the one after it. places: of the queries."""
    at = torch.arange(places.start, places.stop, device=device)[None]
    row, head = torch.arange(batch, device=device)[:, None], at.new_zeros(1, 1)
    before = at[:, max(0, first_key + 1 - places.start) :]
    if not bool(torch.as_tensor(mask_function(row, head, before, before - 1)).all()):
        raise PatchError(
            "The attention mask hides preceding tokens: documents are packed into one row, or the model attends in "
            "chunks. Distance methods require one document per row."
        )
    if bool(torch.as_tensor(mask_function(row, head, at[:, :-1], at[:, 1:])).any()):
        raise PatchError("The attention mask is not causal, which distance methods require.")


def refuse_other_positions(position_ids: Tensor | None, rows: list[RowPadding], queries: int) -> None:
    """Raise PatchError unless the positions of tokens are consecutive. Padding may have any position."""
    if position_ids is None or queries == 1 or position_ids.shape[1:] != (queries,):
        return
    steps = position_ids.diff(dim=1).expand(len(rows), -1)
    index = torch.arange(1, queries, device=steps.device)
    begins = torch.tensor([padding - first for padding, first, _ in rows], device=steps.device)[:, None]
    odd = (steps != 1) & (index > begins)
    # from the first such step on, constant positions are padding at the end
    ended = odd.cumsum(1) > 0
    if bool((ended & (steps != 0) & (ended.cumsum(1) > 1)).any()):
        raise PatchError(
            "position_ids are not consecutive, as with packed documents; distance methods require consecutive "
            "positions. Put one document in each row and omit position_ids."
        )
