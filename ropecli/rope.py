"""What a rotary position embedding is, in numbers: its geometry; and what methods give, Frequencies or a Remapping.

Owns the base frequencies. Knows no method, config or model.
Source: Su et al. 2021 (arXiv:2104.09864), section 3.2.2: θ_i = b^(-2i/d).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class RopeGeometry:
    """What a model, or one of its layer types, was pretrained with.

    head_dim: width of a head. rotary_dim: width of the part of it that turns, even.
    rope_theta: the base b. original_max_position_embeddings: the pretraining length, tokens.
    layer_type: None where all layers share one geometry. still_pairs: how many of the slowest pairs were
    pretrained without turning at all (p-RoPE, which transformers calls `proportional`).
    """

    head_dim: int
    rotary_dim: int
    rope_theta: float
    original_max_position_embeddings: int
    layer_type: str | None = None
    still_pairs: int = 0

    @property
    def pairs(self) -> int:
        return self.rotary_dim // 2

    def inv_freq(self, rope_theta: float | None = None) -> np.ndarray:
        """Pretrained frequencies: b^(-2i/d), and 0 for the still pairs.

        Shape (rotary_dim/2,), float64, radians per token, fastest first. rope_theta: another base than the own.
        """
        frequencies = self.powers(rope_theta)
        frequencies[self.pairs - self.still_pairs :] = 0.0
        return frequencies

    def powers(self, rope_theta: float | None = None) -> np.ndarray:
        """b^(-2i/d) for every pair, the still ones included: what stock longrope divides by its factors."""
        exponents = np.arange(0, self.rotary_dim, 2, dtype=np.float64) / self.rotary_dim
        return (rope_theta or self.rope_theta) ** -exponents


@dataclass(frozen=True)
class Frequencies:
    """What a frequency method gives.

    inv_freq: shape (rotary_dim/2,), float64, radians per token, index 0 fastest. attention_factor: multiplies cos and
    sin. rope_theta: the base to write, where the method is nothing but another base. params: the method's parameters,
    as they were settled.
    """

    inv_freq: np.ndarray
    attention_factor: float = 1.0
    rope_theta: float = math.nan
    params: Mapping[str, object] = field(default_factory=dict)


Positions = Callable[[np.ndarray], np.ndarray]
"""Takes positions, shape (tokens,), int64, and gives one for each: whole numbers, or fractions of tokens."""


@dataclass(frozen=True)
class Branch:
    """The keys that a query sees in one way: at n it sees those at m, start(n) <= m < stop(n), query(n) - key(m) away.

    start and stop: whole numbers from 0 on, at most n + 1, which never fall as n grows; no key where stop(n) is not
    above start(n). query, key: None for the positions as they are, so that the distance is n - m.
    """

    start: Positions
    stop: Positions
    query: Positions | None = None
    key: Positions | None = None


@dataclass(frozen=True)
class Remapping:
    """Which keys a query sees, and at which distance ρ(n, m): n - m in plain attention, over all m <= n.

    branches: no key is in two of them for any query; one that is in none is masked. params: the method's parameters,
    every one as it was settled for a model that was trained to read `pretrained` tokens and is to read `target`.
    """

    branches: tuple[Branch, ...]
    params: Mapping[str, object] = field(default_factory=dict)
    pretrained: int = 0
    target: int = 0

    def distances(self, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """ρ(n, m), tokens, for every query's position n and key's position m; NaN where n does not see m.

        Shape (queries, keys), float64.
        """
        seen = np.full((len(queries), len(keys)), np.nan)
        for branch in self.branches:
            inside = (keys >= branch.start(queries)[:, None]) & (keys < branch.stop(queries)[:, None])
            at = queries if branch.query is None else branch.query(queries)
            of = keys if branch.key is None else branch.key(keys)
            seen[inside] = (at[:, None] - of[None].astype(np.float64))[inside]
        return seen
