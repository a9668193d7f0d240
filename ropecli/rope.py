"""The geometry of a rotary position embedding, and the results of scaling methods: Frequencies or a Remapping.

Source: Su et al. 2021 (arXiv:2104.09864), section 3.2.2: θ_i = b^(-2i/d).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class RopeGeometry:
    """Rotary embedding of a pretrained model, or of one of its layer types.

    head_dim: width of a head. rotary_dim: width of the rotary part of a head, even.
    rope_theta: the base b. original_max_position_embeddings: the pretraining length, tokens.
    layer_type: None if all layers share one geometry. still_pairs: number of the slowest pairs that were
    pretrained without rotation (p-RoPE; `proportional` in transformers). scaled_inv_freq: the frequencies of an earlier
    method, for the next one in a combination.
    """

    head_dim: int
    rotary_dim: int
    rope_theta: float
    original_max_position_embeddings: int
    layer_type: str | None = None
    still_pairs: int = 0
    scaled_inv_freq: tuple[float, ...] | None = field(default=None, repr=False)

    @property
    def pairs(self) -> int:
        return self.rotary_dim // 2

    def inv_freq(self, rope_theta: float | None = None) -> np.ndarray:
        """Pretrained frequencies, or those of an earlier method: b^(-2i/d), and 0 for pairs that do not rotate.

        Shape (rotary_dim/2,), float64, radians per token, fastest first. rope_theta: use this base instead.
        """
        if self.scaled_inv_freq is not None:
            return np.array(self.scaled_inv_freq)
        frequencies = self.powers(rope_theta)
        frequencies[self.pairs - self.still_pairs :] = 0.0
        return frequencies

    def powers(self, rope_theta: float | None = None) -> np.ndarray:
        """b^(-2i/d) for every pair, including those that do not rotate. Stock longrope divides these by its factors."""
        exponents = np.arange(0, self.rotary_dim, 2, dtype=np.float64) / self.rotary_dim
        return (rope_theta or self.rope_theta) ** -exponents


@dataclass(frozen=True)
class Frequencies:
    """Result of a frequency method.

    inv_freq: shape (rotary_dim/2,), float64, radians per token, index 0 fastest. attention_factor: multiplies cos and
    sin. rope_theta: the new base, for methods that only change the base. params: the method's parameters, with
    defaults resolved.
    """

    inv_freq: np.ndarray
    attention_factor: float = 1.0
    rope_theta: float = math.nan
    params: Mapping[str, object] = field(default_factory=dict)


PositionMap = Callable[[np.ndarray], np.ndarray]
"""Maps positions, shape (tokens,), int64, to new positions of the same shape, which may be fractional."""


@dataclass(frozen=True)
class Branch:
    """A range of keys with one distance rule: start(n) <= m < stop(n), at distance query(n) - key(m).

    start and stop: integers from 0 to n + 1, non-decreasing in n; the range is empty if stop(n) <= start(n).
    query, key: None for unchanged positions; if both are None, the distance is n - m.
    """

    start: PositionMap
    stop: PositionMap
    query: PositionMap | None = None
    key: PositionMap | None = None


@dataclass(frozen=True)
class Remapping:
    """Which keys a query attends to, and at which distance ρ(n, m). Standard causal attention: n - m for all m <= n.

    branches: disjoint for every query; keys in no branch are masked. params: the method's parameters, all resolved.
    pretrained: the pretraining length; target: the length to extend to, tokens. score_factor: multiplies the scores of
    the query at each position; None for no change.
    """

    branches: tuple[Branch, ...]
    params: Mapping[str, object] = field(default_factory=dict)
    pretrained: int = 0
    target: int = 0
    score_factor: PositionMap | None = None

    def distances(self, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """ρ(n, m), tokens, for every query position n and key position m; NaN where m is masked.

        Shape (queries, keys), float64.
        """
        seen = np.full((len(queries), len(keys)), np.nan)
        for branch in self.branches:
            inside = (keys >= branch.start(queries)[:, None]) & (keys < branch.stop(queries)[:, None])
            at = queries if branch.query is None else branch.query(queries)
            of = keys if branch.key is None else branch.key(keys)
            seen[inside] = (at[:, None] - of[None].astype(np.float64))[inside]
        return seen
