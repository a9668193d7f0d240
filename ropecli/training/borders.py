"""Proves on the live model that positions with gaps or restarts do what the recipe means by them.

transformers reads the borders of packed documents off the positions, and only some models and attention
implementations follow; one that does not would train on the wrong thing without a word.
"""

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ropecli.errors import RecipeError
from ropecli.training.loss import NextTokenLoss

if TYPE_CHECKING:
    from collections.abc import Iterator

_HALF = 8
_GAP = 5
_ROUNDINGS = 16


def prove_positions(loss_of: NextTokenLoss, positions: str, packed: bool) -> None:
    """Reads sixteen tokens with a gap, or a restart, in the middle. positions: the recipe's word for them.

    Raises RecipeError where the gap changes nothing, where it cuts the attention, or where a restart does not.
    """
    with _at_rest(loss_of):
        if packed and _is_seen_beyond(loss_of, [*range(_HALF), *range(_HALF)], packed=True):
            raise RecipeError(
                f"{type(loss_of.model).__name__} lets packed documents attend to one another. Take sequences: long or "
                "concat, or another attn."
            )
        if positions != "full":
            _prove_gaps(loss_of, positions)


def _prove_gaps(loss_of: NextTokenLoss, name: str) -> None:
    gap = [*range(_HALF), *range(_HALF + _GAP, 2 * _HALF + _GAP)]
    if _same(_states(loss_of, list(range(2 * _HALF))), _states(loss_of, gap)):
        raise RecipeError(
            f"{type(loss_of.model).__name__} does not follow the positions that it is given; {name} needs it."
        )
    if not _is_seen_beyond(loss_of, gap, packed=False):
        raise RecipeError(
            f"{type(loss_of.model).__name__} takes a gap in the positions for the border of a document; {name} cannot "
            "be trained with it. Try another attn."
        )


def _is_seen_beyond(loss_of: NextTokenLoss, positions: list[int], *, packed: bool) -> bool:
    """Whether the tokens after the middle are predicted otherwise when one before it changes."""
    one, other = (_states(loss_of, positions, packed=packed, changed=changed) for changed in (False, True))
    return not _same(one[_HALF:], other[_HALF:])


def _states(
    loss_of: NextTokenLoss, positions: list[int], *, packed: bool = False, changed: bool = False
) -> torch.Tensor:
    """The last hidden states, shape (tokens, width)."""
    device = next(loss_of.parameters()).device
    ids = torch.arange(1, 2 * _HALF + 1, device=device)[None]
    if changed:
        ids[0, _HALF - 2] = 0
    return loss_of.hidden(ids, torch.tensor([positions], device=device), packed).last_hidden_state[0]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Within rounding, which experts that see other batches of tokens bring about."""
    allowed = _ROUNDINGS * torch.finfo(one.dtype).eps * one.abs().max()
    return bool((one - other).abs().max() <= allowed)


@contextmanager
def _at_rest(loss_of: NextTokenLoss) -> "Iterator[None]":
    """Without dropout and gradients, and leaving the random state as it is."""
    training = loss_of.training
    loss_of.eval()
    with torch.no_grad():
        yield
    loss_of.train(training)
