"""The left padding of each row of a batch, and where its queries and keys begin; passed in place of a mask.

Refuses cases that would give silently wrong results: packed documents, other masks, padding between tokens.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ropecli.errors import PatchError


class RowPadding(NamedTuple):
    """padding: padding tokens at the left. query, key: the index of the first query and the first key of a pass."""

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
    **others: Any,
) -> Tensor:
    """A mask function of transformers' interface that describes each row's padding in place of a mask.

    Shape (batch, 1, 1, 3), int64, on the CPU, where reading it does not wait for another device; transformers passes on
    four dimensions unchanged. Raises PatchError for a mask that is not
    causal with padding at the ends.
    """
    first = int(q_offset)
    if use_vmap:
        raise PatchError("The model overlays a mask of its own, which a distance method would ignore.")
    # models make the sliding layers' mask though they have no such layer, and then it may be one that hides everything
    if mask_function is not None and local_size is None:
        _refuse_other_masks(mask_function, batch_size, range(first, first + q_length), kv_offset, device)
    paddings = [0] * batch_size if attention_mask is None else _left_paddings(attention_mask, first + q_length)
    rows = [RowPadding(padding, first, kv_offset) for padding in paddings]
    return torch.tensor(rows, device="cpu")[:, None, None]


def read_padding(described: Tensor | None) -> list[RowPadding]:
    """The rows that describe_padding returned in place of a mask. Raises PatchError for any other mask."""
    if described is None or described.dtype != torch.int64 or described.shape[1:] != (1, 1, 3):
        given = "no mask" if described is None else f"a mask of shape {tuple(described.shape)}"
        raise PatchError(
            f"The model gives its attention {given}; a distance method takes none but the causal one with padding, "
            "which transformers makes from a mask of shape (batch, tokens)."
        )
    return [RowPadding(*row) for row in described[:, 0, 0].tolist()]


def _left_paddings(mask: Tensor, tokens: int) -> list[int]:
    """mask: shape (batch, tokens or more), true for tokens. Raises PatchError for padding between tokens."""
    if mask.shape[1] < tokens:
        raise PatchError(
            f"The attention mask is of {mask.shape[1]} tokens, and with those in the cache there are {tokens}; it must "
            "be of all of them."
        )
    mask = mask[:, :tokens].to(torch.int64)
    first, last = mask.argmax(1), tokens - 1 - mask.flip(1).argmax(1)
    counts = mask.sum(1)
    if bool(((counts != last - first + 1) & (counts > 0)).any()):
        raise PatchError("The attention mask has padding between tokens; a distance method takes it at the ends alone.")
    return torch.where(counts > 0, first, tokens).tolist()


def _refuse_other_masks(
    mask_function: Callable[..., Any], batch: int, places: range, first_key: int, device: torch.device | str
) -> None:
    """A token sees the one before it and not the one after it. places: the queries'."""
    at = torch.arange(places.start, places.stop, device=device)[None]
    row, head = torch.arange(batch, device=device)[:, None], at.new_zeros(1, 1)
    before = at[:, max(0, first_key + 1 - places.start) :]
    if not bool(torch.as_tensor(mask_function(row, head, before, before - 1)).all()):
        raise PatchError(
            "Tokens do not see the ones before them: documents are packed into one sequence, or the model attends in "
            "chunks. A distance method reads one document per row."
        )
    if bool(torch.as_tensor(mask_function(row, head, at[:, :-1], at[:, 1:])).any()):
        raise PatchError("Tokens see the ones after them, which a distance method would not let them.")


def refuse_other_positions(position_ids: Tensor | None, rows: list[RowPadding], queries: int) -> None:
    """Raises PatchError unless every token is one position after the one before; padding may have any position."""
    if position_ids is None or queries == 1 or position_ids.shape[1:] != (queries,):
        return
    steps = position_ids.diff(dim=1).expand(len(rows), -1)
    index = torch.arange(1, queries, device=steps.device)
    begins = torch.tensor([padding - first for padding, first, _ in rows], device=steps.device)[:, None]
    odd = (steps != 1) & (index > begins)
    # from the first such step on, what is at one place is padding at the end
    ended = odd.cumsum(1) > 0
    if bool((ended & (steps != 0) & (ended.cumsum(1) > 1)).any()):
        raise PatchError(
            "The positions leave some out or begin again, as where documents are packed into one row; a distance "
            "method counts the tokens of a row one by one. Give each document a row, and no position_ids."
        )
