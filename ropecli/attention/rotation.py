"""How a model rotates its heads, and rotating them further, to other positions; with tables of the angles.

Source: Su et al. 2021 (arXiv:2104.09864), section 3.4.2: pair i of a head at position p is turned by p·θ_i. Turns by
two positions one after the other are one turn by their sum, so that a head at n turned by ρ - n is one at ρ.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ropecli.rope import Positions

_SMALLEST = 512


class Turn(NamedTuple):
    """cos and sin of the angles to turn by, each of shape (tokens, pairs)."""

    cos: Tensor
    sin: Tensor

    def rows(self, first: int, stop: int) -> "Turn":
        return Turn(self.cos[first:stop], self.sin[first:stop])


@dataclass(frozen=True, eq=False)
class Rotation:
    """How a model turns its heads.

    inv_freq: shape (pairs,), float64, radians per token. start: the first dimension of a head that turns. neighbours:
    pair i is dimensions (2i, 2i + 1) of what turns, in place of (i, i + pairs).
    """

    inv_freq: np.ndarray
    start: int = 0
    neighbours: bool = False

    def turn(self, states: Tensor, by: np.ndarray) -> Tensor:
        """states: shape (..., tokens, head_dim). by: shape (tokens,), float64, positions to turn each token further."""
        return self.apply(states, self.make_turn(by, states.device, computing_dtype(states)))

    def make_turn(self, by: np.ndarray, device: torch.device, dtype: torch.dtype) -> Turn:
        """by: as in turn. Angles are float64, whatever the dtype: in float32 they are 1e-3 off beyond 16,384 tokens."""
        angles = np.asarray(by, dtype=np.float64)[:, None] * self.inv_freq
        with torch.inference_mode(False):  # what a pass for inference made could not be used in training afterwards
            cos, sin = (torch.tensor(values, device=device, dtype=dtype) for values in (np.cos(angles), np.sin(angles)))
        return Turn(cos, sin)

    def apply(self, states: Tensor, turn: Turn) -> Tensor:
        """states: as in turn. Half precision is turned in float32; the result has the states' dtype."""
        result = torch.empty_like(states)
        stop = self.start + 2 * len(self.inv_freq)
        result[..., : self.start] = states[..., : self.start]
        result[..., stop:] = states[..., stop:]
        one, two = (half.to(turn.cos.dtype) for half in self._halves(states))
        first, second = self._halves(result)
        first.copy_(torch.mul(one, turn.cos).addcmul_(two, turn.sin, value=-1))
        second.copy_(torch.mul(two, turn.cos).addcmul_(one, turn.sin))
        return result

    def _halves(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """The first and the second dimension of every pair, each of shape (..., pairs)."""
        pairs = len(self.inv_freq)
        turning = states[..., self.start : self.start + 2 * pairs]
        if self.neighbours:
            return turning[..., 0::2], turning[..., 1::2]
        return turning[..., :pairs], turning[..., pairs:]


def computing_dtype(states: Tensor) -> torch.dtype:
    """float64 for such states, float32 for all others."""
    return torch.float64 if states.dtype == torch.float64 else torch.float32


class _Place(NamedTuple):
    device: torch.device
    dtype: torch.dtype


class TurnTable:
    """How far one side of a branch, its queries or its keys, is turned at each position: by positions(p) - p."""

    def __init__(self, positions: Positions, rotation: Rotation) -> None:
        self._positions = positions
        self._rotation = rotation
        self._known: dict[_Place, Turn] = {}

    def turn(self, states: Tensor, first: int) -> Tensor:
        """states: shape (..., tokens, head_dim), of contiguous positions from `first` on."""
        stop = first + states.shape[-2]
        return self._rotation.apply(states, self._rows(states, first, stop))

    def _rows(self, states: Tensor, first: int, stop: int) -> Turn:
        place = _Place(states.device, computing_dtype(states))
        if type(states) is not Tensor:  # without storage, as in the foresight of a training step: not to be kept
            return self._make(first, stop, place)
        known = self._known.get(place)
        if known is None or len(known.cos) < stop:
            known = self._known[place] = self._make(0, max(_SMALLEST, 1 << int(stop - 1).bit_length()), place)
        return known.rows(first, stop)

    def _make(self, first: int, stop: int, place: _Place) -> Turn:
        positions = np.arange(first, stop)
        return self._rotation.make_turn(self._positions(positions) - positions, *place)


class Sides(NamedTuple):
    """How the queries and the keys of a branch are turned; None for as they are."""

    query: TurnTable | None
    key: TurnTable | None
