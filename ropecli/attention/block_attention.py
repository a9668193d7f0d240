"""Attention at remapped distances: fused kernels on a GPU, otherwise blocks of queries.

Does not depend on methods, configs or models, and expects no padding.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from ropecli.attention.block_loop import BlockLoop, KeyRange, find_ranges
from ropecli.attention.flex_kernels import attend_by_flex, make_block_masks, suits_flex
from ropecli.attention.rotation import RotatedKeys, Rotation, RotationTable, computing_dtype
from ropecli.rope import PositionMap, Remapping

_SCORES_ON_CPU, _SCORES_ELSEWHERE = 2**20, 2**25
"""Scores per block. On a CPU they should fit into its cache."""

_MIN_QUERIES, _MAX_QUERIES = 16, 128
"""Queries per block: fewer are slow; more compute more scores that are masked anyway."""


class BlockAttention:
    """Attention at the distances of a remapping, for heads already rotated to their own positions.

    Layers with the same rotation share one instance, which caches the angles. rotation: None for a remapping that only
    masks.
    """

    def __init__(self, remapping: Remapping, rotation: Rotation | None) -> None:
        self.remapping = remapping
        self._tables = {
            positions: RotationTable(rotation, positions)
            for branch in remapping.branches
            for positions in (branch.query, branch.key)
            if rotation and positions
        }
        self._masks = lru_cache(maxsize=4)(partial(make_block_masks, remapping))  # every layer uses the same masks

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
        kept: RotatedKeys | None = None,
    ) -> Tensor:
        """query: shape (batch, heads, queries, head_dim); key: (batch, kv heads, keys, head_dim); value: (batch, kv
        heads, keys, width), all on one device. Query i is at position first_query + i, key j at first_key + j.

        scaling: multiplies the scores. softcap: scores become softcap·tanh(score/softcap). sinks: shape (heads,), extra
        scores in the softmax, without values. Scores and sums are float32, or float64 for float64 inputs.
        last_block_alone: see BlockLoop. kept: the layer's rotated keys of earlier passes; not for training. Returns
        shape (batch, heads, queries, width), in value's dtype.
        """
        if self.remapping.score_factor is not None:
            factors = self.remapping.score_factor(np.arange(first_query, first_query + query.shape[2]))
            by_query = torch.tensor(factors, device=query.device, dtype=computing_dtype(query))
            query = (query * by_query[:, None]).to(query.dtype)
        places = (first_query, query.shape[2], first_key, key.shape[2])
        ranges = find_ranges(self.remapping, *places)
        if suits_flex(query, key, value):
            every_key = {keys.branch.key: key.shape[2] for keys in ranges if keys.branch.key}  # as the masks count them
            rotated = self._rotate(ranges, query, key, first_query, first_key, every_key, {})
            masks = self._masks(*places, query.device)
            try:
                return attend_by_flex(rotated, value, masks, scaling=scaling, softcap=softcap, sinks=sinks)
            except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
                # no compiler, too little shared memory or too many recompilations
                warnings.warn(f"Attention runs without fused kernels, which is slower: {error}", stacklevel=2)
        (batch, heads, queries, head_dim), dtype = query.shape, computing_dtype(query)
        kv_heads = key.shape[1]
        group = heads // kv_heads
        seen: dict[PositionMap, int] = {}  # by the positions that branches rotate keys to: keys up to the last one seen
        for keys in ranges:
            if keys.branch.key:
                seen[keys.branch.key] = max(seen.get(keys.branch.key, 0), int(keys.stop[-1]))
        rotated_keys: dict[PositionMap, Tensor] = {}
        if kept is not None:
            for to, count in seen.items():
                rotated_keys[to] = kept.rotate(self._tables[to], key[:, :, :count], first_key).flatten(0, 1)
            seen = {}
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
            known = {to: tensor[part] for to, tensor in rotated_keys.items()}
            rotated = self._rotate(ranges, part_query, part_key, first_query, first_key, seen, known)
            results.append(loop.run(rotated, *values_and_sinks).to(value.dtype))
        return torch.cat(results).view(batch, heads, queries, -1)

    def _rotate(
        self,
        ranges: Sequence[KeyRange],
        query: Tensor,
        key: Tensor,
        first_query: int,
        first_key: int,
        seen: Mapping[PositionMap, int],
        known: dict[PositionMap, Tensor],
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the queries and keys of each branch. query, key: at their own positions, (..., tokens, head_dim).

        seen: number of keys to rotate to other positions. known: keys already rotated to them.
        """
        rotated_keys = known | {
            to: self._tables[to].rotate(key[..., :count, :], first_key) for to, count in seen.items()
        }
        for branch in (keys.branch for keys in ranges):
            rotated = self._tables[branch.query].rotate(query, first_query) if branch.query else query
            yield rotated, rotated_keys[branch.key] if branch.key else key
