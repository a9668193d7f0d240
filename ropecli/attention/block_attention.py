"""Attention at remapped distances, a block of queries at a time: extra memory is O(block × keys), never O(n × n).

A block has one softmax over all that its queries see; keys that none of them sees are not computed. The idea is of
Rabe and Staats 2021 (arXiv:2112.05682). Knows no method, config or model; expects no padding.
"""

import warnings
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ropecli.attention.block_loop import BlockLoop, Softmax
from ropecli.attention.flex_kernels import attend_by_flex, is_failed_compilation, make_block_masks, suits_flex
from ropecli.attention.key_ranges import count_keys, find_ranges
from ropecli.attention.rotation import BranchRotation, Rotation, RotationTable, computing_dtype
from ropecli.rope import Positions, Remapping

_SCORES_ON_CPU = 2**21
"""Scores of a block: so many stay in the cache."""

_SCORES_ELSEWHERE = 2**25

_FEWEST_QUERIES, _MOST_QUERIES = 16, 256
"""Queries of a block: fewer are slow, however many keys they see; more compute more of what is masked."""


class BlockAttention:
    """Attention as a remapping has it, for heads that arrive rotated at their own positions.

    One serves all layers that rotate alike, and keeps the angles it has met. rotation: None for a remapping that
    rotates nothing; raises ValueError for any other then.
    """

    def __init__(self, remapping: Remapping, rotation: Rotation | None) -> None:
        self.remapping = remapping

        @cache  # branches of the same positions share a table
        def table(positions: Positions | None) -> RotationTable | None:
            if positions is None:
                return None
            if rotation is None:
                raise ValueError("This remapping turns heads: it needs to know how the model does.")
            return RotationTable(positions, rotation)

        self._sides = tuple(BranchRotation(table(branch.query), table(branch.key)) for branch in remapping.branches)
        # What the next layer asks for again.
        self._ranges = lru_cache(maxsize=4)(partial(find_ranges, remapping))
        self._masks = lru_cache(maxsize=4)(partial(make_block_masks, remapping))

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
        dropout: float = 0.0,
    ) -> Tensor:
        """query: shape (batch, heads, queries, head_dim); key: (batch, kv heads, keys, head_dim); value: (batch, kv
        heads, keys, width), all of one device. Query i is at position first_query + i, key j at first_key + j.

        scaling: multiplies the scores. softcap: they become softcap·tanh(score/softcap). sinks: shape (heads,), scores
        that take part in the softmax and have no value. dropout: of probabilities. Scores and sums are float32, or
        float64 for such states. Returns shape (batch, heads, queries, width), in value's dtype; zeros for a query that
        sees no key.
        """
        batch, heads, queries, head_dim = query.shape
        kv_heads, keys, width = value.shape[1:]
        group = heads // kv_heads
        ranges = self._ranges(first_query, queries, first_key, keys)
        counts = count_keys(ranges, queries)
        if not counts.any():
            return value.new_zeros(batch, heads, queries, width)
        if suits_flex(query, key, value, dropout):
            sides = [self._sides[one.branch] for one in ranges]
            masks = self._masks(first_query, queries, first_key, keys, query.device)
            options: dict[str, Any] = {"scaling": scaling, "softcap": softcap, "sinks": sinks}
            try:
                return attend_by_flex(query, key, value, sides, masks, first_query, first_key, **options)
            except Exception as error:
                if not is_failed_compilation(error):
                    raise
                warnings.warn(f"Attention runs without fused kernels, slower: {error}", stacklevel=2)
        query, key, value = query.reshape(-1, group, queries, head_dim), key.flatten(0, 1), value.flatten(0, 1)
        if sinks is not None:
            sinks = sinks.view(kv_heads, group).repeat(batch, 1).to(computing_dtype(query))
        most = _SCORES_ON_CPU if query.device.type == "cpu" else _SCORES_ELSEWHERE
        scores = group * int(counts.max())
        rows = min(queries, max(_FEWEST_QUERIES, min(_MOST_QUERIES, most // scores)))
        units = max(1, most // max(rows * scores, keys * head_dim))  # of one token's block, its rotated keys are more
        loop = BlockLoop(self._sides, ranges, rows, first_query, first_key, scaling)
        results = []
        for at in (slice(first, first + units) for first in range(0, len(query), units)):
            softmax = Softmax(softcap, None if sinks is None else sinks[at], dropout)
            results.append(loop.run(query[at], key[at], value[at], softmax))
        result = torch.cat(results).view(batch, heads, queries, width)
        if not counts.all():
            result = result.masked_fill(torch.tensor(counts == 0, device=result.device)[:, None], 0.0)
        return result
