"""Attention at remapped distances: fused kernels on a GPU, otherwise blocks of queries.

Does not depend on methods, configs or models, and expects no padding.
"""

import warnings
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from ropecli.attention.block_loop import BlockLoop
from ropecli.attention.flex_kernels import attend_by_flex, is_failed_compilation, make_block_masks, suits_flex
from ropecli.attention.key_ranges import KeyRange, find_ranges
from ropecli.attention.rotation import Rotation, RotationTable, computing_dtype
from ropecli.rope import Positions, Remapping

_SCORES_ON_CPU, _SCORES_ELSEWHERE = 2**20, 2**25
"""Scores per block. On a CPU they should fit into its cache."""

_MIN_QUERIES, _MAX_QUERIES = 16, 256
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
    ) -> Tensor:
        """query: shape (batch, heads, queries, head_dim); key: (batch, kv heads, keys, head_dim); value: (batch, kv
        heads, keys, width), all on one device. Query i is at position first_query + i, key j at first_key + j.

        scaling: multiplies the scores. softcap: scores become softcap·tanh(score/softcap). sinks: shape (heads,), extra
        scores in the softmax, without values. Scores and sums are float32, or float64 for float64 inputs.
        last_block_alone: see BlockLoop. Returns shape (batch, heads, queries, width), in value's dtype.
        """
        query = self._multiply(query, first_query)
        places = (first_query, query.shape[2], first_key, key.shape[2])
        ranges = find_ranges(self.remapping, *places)
        if suits_flex(query, key, value):
            rotated = self._rotate(ranges, query, key, first_query, first_key)
            masks = self._masks(*places, query.device)
            try:
                return attend_by_flex(rotated, value, masks, scaling=scaling, softcap=softcap, sinks=sinks)
            except Exception as error:
                if not is_failed_compilation(error):
                    raise
                warnings.warn(f"Attention runs without fused kernels, which is slower: {error}", stacklevel=2)
        batch, heads, queries, head_dim = query.shape
        kv_heads, keys = key.shape[1:3]
        group = heads // kv_heads
        limit = _SCORES_ON_CPU if query.device.type == "cpu" else _SCORES_ELSEWHERE
        scores = group * int(sum(one.stop - one.first for one in ranges).max())
        rows = min(queries, max(_MIN_QUERIES, min(_MAX_QUERIES, limit // scores)))
        units = max(1, limit // max(rows * scores, keys * head_dim))  # with one query, the rotated keys are larger
        loop = BlockLoop(ranges, rows, scaling, softcap, last_block_alone)
        states = [query.reshape(-1, group, queries, head_dim), key.flatten(0, 1), value.flatten(0, 1)]
        if sinks is not None:
            states.append(sinks.view(kv_heads, group).repeat(batch, 1))
        results, dtype = [], computing_dtype(query)
        for own in zip(*(one.split(units) for one in states), strict=True):
            queries_of_units, keys_of_units, *others = (one.to(dtype) for one in own)
            rotated = self._rotate(ranges, queries_of_units, keys_of_units, first_query, first_key)
            results.append(loop.run(rotated, *others).to(value.dtype))
        return torch.cat(results).view(batch, heads, queries, -1)

    def _multiply(self, query: Tensor, first: int) -> Tensor:
        """Multiply the queries by the remapping's score factors."""
        if self.remapping.score_factor is None:
            return query
        factors = self.remapping.score_factor(np.arange(first, first + query.shape[2]))
        return (query * torch.tensor(factors, device=query.device, dtype=computing_dtype(query))[:, None]).to(
            query.dtype
        )

    def _rotate(
        self, ranges: Sequence[KeyRange], query: Tensor, key: Tensor, first_query: int, first_key: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the queries and keys rotated for each branch. query, key: shape (..., tokens, head_dim)."""
        for one in ranges:
            yield (
                self._rotate_to(one.branch.query, query, first_query),
                self._rotate_to(one.branch.key, key, first_key),
            )

    def _rotate_to(self, positions: Positions | None, states: Tensor, first: int) -> Tensor:
        return states if positions is None else self._tables[positions].rotate(states, first)
