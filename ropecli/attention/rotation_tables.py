"""The turns that a remapping asks for, by position, made once and kept: layers share them, and so do tokens."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ropecli.attention.rotation import Rotation, Turn, computing_dtype
from ropecli.rope import Positions

_SMALLEST = 512


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
