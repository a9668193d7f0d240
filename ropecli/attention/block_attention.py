"""Attention at remapped distances: rotates heads further, to other positions, then attends by the kernels.

Su et al. 2021 (arXiv:2104.09864), section 3.4.2: pair i of a head at position p is rotated by p·θ_i. Rotations add up,
so rotating a head at position n by ρ - n moves it to position ρ. This does not depend on methods, configs or models,
and expects no padding.
"""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ropecli.attention.kernels import BlockLoop, KeyRange, attend_by_flex, find_ranges, make_block_masks, suits_flex
from ropecli.rope import PositionMap, Remapping

_SCORES_ON_CPU, _SCORES_ELSEWHERE = 2**20, 2**25
"""Scores per block. On a CPU they should fit into its cache."""
_MIN_QUERIES, _MAX_QUERIES = 16, 128
"""Queries per block: fewer are slow; more compute more scores that are masked anyway."""


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


def _parts(ranges: list[KeyRange]) -> list[int]:
    """The first query of each part: later queries may rotate keys to other positions, and one copy is kept at a time.

    Branches that begin at the same query share a part.
    """
    begins = {int((keys.stop > keys.first).argmax()) for keys in ranges if keys.branch.key}
    return [0, *sorted(begins)[1:]]


class BlockAttention:
    """Attention at the distances of a remapping, for heads already rotated to their own positions.

    Layers with the same rotation share one instance, which caches the angles. rotation: None for a remapping that only
    masks.
    """

    def __init__(self, remapping: Remapping, rotation: Rotation | None) -> None:
        self.remapping, self._rotation = remapping, rotation
        self._angles: dict[tuple[PositionMap, torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._masks = lru_cache(maxsize=32)(partial(make_block_masks, remapping))  # every layer uses the same masks

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        first_query: int,
        first_key: int,
        scaling: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        last_block_alone: bool = False,
    ) -> Tensor:
        """query: shape (batch, heads, queries, head_dim); key: (batch, kv heads, keys, head_dim); value: (batch, kv
        heads, keys, width), all on one device. Query i is at position first_query + i, key j at first_key + j.

        scaling: multiplies the scores. softcap: scores become softcap·tanh(score/softcap). sinks: shape (heads,), extra
        scores in the softmax, without values. Scores and sums are float32, or float64 for float64 inputs.
        last_block_alone: see BlockLoop. Returns shape (batch, heads, queries, width), in value's dtype.
        """
        places = (first_query, query.shape[2], first_key, key.shape[2])
        ranges = find_ranges(self.remapping, *places)
        if len(begins := _parts(ranges)) > 1:
            options: Any = {"scaling": scaling, "softcap": softcap, "sinks": sinks}
            options |= {"last_block_alone": last_block_alone, "first_key": first_key}
            parts = []
            for begin, stop in pairwise((*begins, query.shape[2])):
                visible = slice(first_query + stop - first_key)
                arguments = query[:, :, begin:stop], key[:, :, visible], value[:, :, visible]
                parts.append(self(*arguments, first_query=first_query + begin, **options))
            return torch.cat(parts, 2)
        if self.remapping.score_factor is not None:
            factors = self.remapping.score_factor(np.arange(first_query, first_query + query.shape[2]))
            by_query = torch.tensor(factors, device=query.device, dtype=computing_dtype(query))
            query = (query * by_query[:, None]).to(query.dtype)
        if suits_flex(query, key, value):
            every_key = {keys.branch.key: key.shape[2] for keys in ranges if keys.branch.key}  # as the masks count them
            rotated = self._rotate(ranges, query, key, first_query, self._rotate_keys(key, first_key, every_key))
            masks = self._masks(*places, query.device)
            try:
                return attend_by_flex(rotated, value, masks, scaling=scaling, softcap=softcap, sinks=sinks)
            except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
                # no compiler, too little shared memory or too many recompilations
                warnings.warn(f"Attention runs without fused kernels, which is slower: {error}", stacklevel=2)
        (batch, heads, queries, head_dim), dtype = query.shape, computing_dtype(query)
        kv_heads = key.shape[1]
        group = heads // kv_heads
        # by the positions that branches rotate keys to: keys up to the last one seen
        by_stop = sorted(ranges, key=lambda keys: keys.stop[-1])
        seen = {keys.branch.key: int(keys.stop[-1]) for keys in by_stop if keys.branch.key}
        limit = _SCORES_ON_CPU if query.device.type == "cpu" else _SCORES_ELSEWHERE
        scores = group * int(sum(keys.stop - keys.first for keys in ranges).max())
        rows = min(queries, max(_MIN_QUERIES, min(_MAX_QUERIES, limit // scores)))
        # with one query, keys that are converted or rotated here are larger than the scores
        copied = key.shape[2] if key.dtype != dtype else sum(seen.values())
        units = max(1, limit // max(rows * scores, copied * head_dim))
        loop = BlockLoop(ranges, rows, scaling, softcap, last_block_alone)
        states = [query.reshape(-1, group, queries, head_dim), key.flatten(0, 1), value.flatten(0, 1)]
        if sinks is not None:
            states.append(sinks.view(kv_heads, group).repeat(batch, 1))
        results = []
        for begin in range(0, batch * kv_heads, units):
            part = slice(begin, begin + units)
            part_query, part_key, *values_and_sinks = (tensor[part].to(dtype) for tensor in states)
            rotated_keys = self._rotate_keys(part_key, first_key, seen)
            rotated = self._rotate(ranges, part_query, part_key, first_query, rotated_keys)
            results.append(loop.run(rotated, *values_and_sinks).to(value.dtype))
        return torch.cat(results).view(batch, heads, queries, -1)

    def _rotate_keys(self, key: Tensor, first_key: int, seen: Mapping[PositionMap, int]) -> dict[PositionMap, Tensor]:
        """The keys at other positions. seen: number of keys to rotate to each."""
        return {to: self._move(key[..., :count, :], first_key, to) for to, count in seen.items()}

    def _rotate(
        self, ranges: list[KeyRange], query: Tensor, key: Tensor, first_query: int, keys: dict[PositionMap, Tensor]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the queries and keys of each branch. query, key: at their own positions, (..., tokens, head_dim).

        keys: at other positions.
        """
        for branch in (keys_of_branch.branch for keys_of_branch in ranges):
            rotated = self._move(query, first_query, branch.query) if branch.query else query
            yield rotated, keys[branch.key] if branch.key else key

    def _move(self, states: Tensor, first: int, to: PositionMap) -> Tensor:
        """Rotate heads to other positions. Caches the angles for the next layer and token.

        states: shape (..., tokens, head_dim), at consecutive positions starting at `first`.
        """
        assert self._rotation is not None
        stop, kind = first + states.shape[-2], (states.device, computing_dtype(states))
        known = self._angles.get((to, *kind))
        if known is None or len(known[0]) < stop:
            at = np.arange(1 << int(stop - 1).bit_length())  # a power of two, so that generation rarely recomputes it
            known = self._rotation.cos_sin(to(at) - at, *kind)
            if type(states) is Tensor:  # the fake tensors of a memory plan have no values to cache
                self._angles[to, *kind] = known
        cos, sin = known
        return self._rotation.apply(states, cos[first:stop], sin[first:stop])
