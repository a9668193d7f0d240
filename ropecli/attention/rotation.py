"""Rotate heads further, to other positions.

Source: Su et al. 2021 (arXiv:2104.09864), section 3.4.2: pair i of a head at position p is rotated by p·θ_i. Rotations
add up, so rotating a head at position n by ρ - n moves it to position ρ.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ropecli.rope import PositionMap

_PIECE = 1024
"""Keys that are rotated at a time, and by which the kept keys grow."""


@dataclass(frozen=True, eq=False)
class Rotation:
    """The rotation of a model's heads.

    inv_freq: shape (pairs,), float64, radians per token. start: first rotary dimension of a head. neighbours: pair i is
    rotary dimensions (2i, 2i + 1) instead of (i, i + pairs).
    """

    inv_freq: np.ndarray
    start: int = 0
    neighbours: bool = False

    def rotate(self, states: Tensor, by: np.ndarray) -> Tensor:
        """states: shape (..., tokens, head_dim). by: shape (tokens,), float64, positions to add for each token."""
        return self.apply(states, *self.cos_sin(by, states.device, computing_dtype(states)))

    def cos_sin(self, by: np.ndarray, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cos and sin, shape (tokens, pairs). Angles are float64: float32 is 1e-3 off beyond position 16,384."""
        angles = np.asarray(by, dtype=np.float64)[:, None] * self.inv_freq
        with torch.inference_mode(False):  # tensors made in inference mode could not be used in training later
            cos, sin = (torch.tensor(values, device=device, dtype=dtype) for values in (np.cos(angles), np.sin(angles)))
        return cos, sin

    def apply(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """states: see rotate. Half precision is rotated in float32; the result has the states' dtype."""
        stop = self.start + 2 * len(self.inv_freq)
        rotating = states[..., self.start : stop].to(cos.dtype)
        if self.neighbours:
            x, y = rotating[..., 0::2], rotating[..., 1::2]
        else:
            x, y = rotating.chunk(2, -1)
        rotated = (x * cos - y * sin, y * cos + x * sin)
        joined = torch.stack(rotated, -1).flatten(-2) if self.neighbours else torch.cat(rotated, -1)
        return torch.cat([states[..., : self.start], joined.to(states.dtype), states[..., stop:]], -1)


def computing_dtype(states: Tensor) -> torch.dtype:
    """float64 for float64 states, float32 for all others."""
    return torch.float64 if states.dtype == torch.float64 else torch.float32


class RotationTable:
    """Rotates heads from each position p to positions(p). Caches the angles for the next layer and token."""

    def __init__(self, rotation: Rotation, positions: PositionMap) -> None:
        self._rotation = rotation
        self._positions = positions
        self._known: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def rotate(self, states: Tensor, first: int) -> Tensor:
        """states: shape (..., tokens, head_dim), at consecutive positions starting at `first`."""
        stop = first + states.shape[-2]
        kind = (states.device, computing_dtype(states))
        known = self._known.get(kind)
        if known is None or len(known[0]) < stop:
            at = np.arange(1 << int(stop - 1).bit_length())  # a power of two, so that generation rarely recomputes it
            known = self._rotation.cos_sin(self._positions(at) - at, *kind)
            if type(states) is Tensor:  # the fake tensors of a memory plan have no values to cache
                self._known[kind] = known
        cos, sin = known
        return self._rotation.apply(states, cos[first:stop], sin[first:stop])


class RotatedKeys:
    """The keys of a KV cache that a layer rotated in earlier passes, so that the next pass rotates only the new keys.

    transformers passes all keys in a new tensor at every step, and may have reordered, cropped or replaced them. So
    each key is compared with the earlier one by the 64-bit sum of its words, and all keys from the first difference on
    are rotated again. Memory: one rotated key in the computing dtype and a sum for each key of the KV cache.
    """

    def __init__(self) -> None:
        self._known: dict[RotationTable, tuple[Any, Tensor, Tensor]] = {}

    def rotate(self, table: RotationTable, keys: Tensor, first: int) -> Tensor:
        """keys: shape (batch, kv heads, tokens, head_dim), at consecutive positions starting at `first`; each is a
        whole number of 64-bit words. Returns them in the computing dtype, valid until the next call with this table.
        """
        batch, heads, stop, head_dim = keys.shape
        kind = (first, keys.dtype, batch, heads)
        sums = keys.view(torch.int64).sum(-1)
        known, earlier, rotated = self._known.get(table, (None, sums, keys))
        if known != kind:
            earlier, rotated = sums[:, :, :0], keys[:, :, :0]
        tokens = min(earlier.shape[2], stop)
        equal = (earlier[:, :, :tokens] == sums[:, :, :tokens]).flatten(0, 1).all(0)
        done = int(equal.cumprod(0).sum())  # the first tokens that are equal in all rows and heads
        if rotated.shape[2] < stop:
            kept, size = rotated[:, :, :done], -(-stop // _PIECE) * _PIECE
            with torch.inference_mode(False):  # tensors made in inference mode could not be written to later
                rotated = keys.new_empty(batch, heads, size, head_dim, dtype=computing_dtype(keys))
            rotated[:, :, :done] = kept
        for begin in range(done, stop, _PIECE):
            piece = keys[:, :, begin : begin + _PIECE].to(rotated.dtype)
            rotated[:, :, begin : begin + piece.shape[2]] = table.rotate(piece, first + begin)
        self._known[table] = (kind, sums, rotated)
        return rotated[:, :, :stop]
