"""How a model rotates its heads, and rotating them further, to other positions; with tables of the angles.

Source: Su et al. 2021 (arXiv:2104.09864), section 3.4.2: pair i of a head at position p is rotated by p·θ_i. Two
rotations one after the other are one by the sum of their positions: a head at n rotated by ρ - n is one at ρ.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ropecli.rope import Positions

_SMALLEST_TABLE = 512
"""Positions."""


class CosSin(NamedTuple):
    """cos and sin of the angles to rotate by, each of shape (tokens, pairs)."""

    cos: Tensor
    sin: Tensor

    def rows(self, first: int, stop: int) -> "CosSin":
        return CosSin(self.cos[first:stop], self.sin[first:stop])


@dataclass(frozen=True, eq=False)
class Rotation:
    """How a model rotates its heads.

    inv_freq: shape (pairs,), float64, radians per token. start: the first dimension of a head that rotates. neighbours:
    pair i is dimensions (2i, 2i + 1) of what rotates, in kind of (i, i + pairs).
    """

    inv_freq: np.ndarray
    start: int = 0
    neighbours: bool = False

    def rotate(self, states: Tensor, by: np.ndarray) -> Tensor:
        """states: shape (..., tokens, head_dim). by: shape (tokens,), float64, positions to add to each token's."""
        return self.apply(states, self.make_cos_sin(by, states.device, computing_dtype(states)))

    def make_cos_sin(self, by: np.ndarray, device: torch.device, dtype: torch.dtype) -> CosSin:
        """by: as in rotate. Angles are float64, whatever the dtype: float32 is 1e-3 off beyond 16,384 tokens."""
        angles = np.asarray(by, dtype=np.float64)[:, None] * self.inv_freq
        with torch.inference_mode(False):  # what a pass for inference made could not be used in training afterwards
            cos, sin = (torch.tensor(values, device=device, dtype=dtype) for values in (np.cos(angles), np.sin(angles)))
        return CosSin(cos, sin)

    def apply(self, states: Tensor, cos_sin: CosSin) -> Tensor:
        """states: as in rotate. Half precision is rotated in float32; the result has the states' dtype."""
        result = torch.empty_like(states)
        stop = self.start + 2 * len(self.inv_freq)
        result[..., : self.start] = states[..., : self.start]
        result[..., stop:] = states[..., stop:]
        one, two = (half.to(cos_sin.cos.dtype) for half in self._halves(states))
        first, second = self._halves(result)
        first.copy_(torch.mul(one, cos_sin.cos).addcmul_(two, cos_sin.sin, value=-1))
        second.copy_(torch.mul(two, cos_sin.cos).addcmul_(one, cos_sin.sin))
        return result

    def _halves(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """The first and the second dimension of every pair, each of shape (..., pairs)."""
        pairs = len(self.inv_freq)
        rotating = states[..., self.start : self.start + 2 * pairs]
        if self.neighbours:
            return rotating[..., 0::2], rotating[..., 1::2]
        return rotating[..., :pairs], rotating[..., pairs:]


def computing_dtype(states: Tensor) -> torch.dtype:
    """float64 for such states, float32 for all others."""
    return torch.float64 if states.dtype == torch.float64 else torch.float32


class _Kind(NamedTuple):
    device: torch.device
    dtype: torch.dtype


class RotationTable:
    """How far one side of a branch, its queries or its keys, is rotated at each position: by positions(p) - p."""

    def __init__(self, positions: Positions, rotation: Rotation) -> None:
        self._positions = positions
        self._rotation = rotation
        self._known: dict[_Kind, CosSin] = {}

    def rotate(self, states: Tensor, first: int) -> Tensor:
        """states: shape (..., tokens, head_dim), of contiguous positions from `first` on."""
        stop = first + states.shape[-2]
        return self._rotation.apply(states, self._rows(states, first, stop))

    def _rows(self, states: Tensor, first: int, stop: int) -> CosSin:
        kind = _Kind(states.device, computing_dtype(states))
        if type(states) is not Tensor:  # without storage, as in the foresight of a training step: not to be kept
            return self._make(first, stop, kind)
        known = self._known.get(kind)
        if known is None or len(known.cos) < stop:
            known = self._known[kind] = self._make(0, max(_SMALLEST_TABLE, 1 << int(stop - 1).bit_length()), kind)
        return known.rows(first, stop)

    def _make(self, first: int, stop: int, kind: _Kind) -> CosSin:
        positions = np.arange(first, stop)
        return self._rotation.make_cos_sin(self._positions(positions) - positions, *kind)


class BranchRotation(NamedTuple):
    """How the queries and the keys of a branch are rotated; None for as they are."""

    query: RotationTable | None
    key: RotationTable | None
