"""The distances of the papers, one query and one key at a time: written from their formulas, and from no Branch.

Each function takes a query's position n, a key's m <= n and the method's checked parameters, and gives ρ(n, m), or None
where n does not see m.
"""

import math
from functools import cache

import numpy as np


def rerope(n: int, m: int, window: int) -> float | None:
    return min(n - m, window)


def leaky_rerope(n: int, m: int, window: int, slope: float) -> float | None:
    distance = n - m
    return distance if distance < window else window + (distance - window) / slope


def self_extend(n: int, m: int, window: int, group: int) -> float | None:
    if n - m < window:
        return n - m
    return math.floor(n / group) - math.floor(m / group) + window - math.floor(window / group)


def jet_long(n: int, m: int, window: int, trained: int) -> float | None:
    group = math.ceil((n + 1) / trained)
    return n - m if n - m <= window else math.floor(n / group) - math.floor(m / group)


def lm_infinite(n: int, m: int, window: int, global_tokens: int) -> float | None:
    sees = m < global_tokens or n - m < window
    return min(n - m, window) if sees else None


@cache
def _held(n: int, window: int, sinks: int) -> tuple[int, ...]:
    """The tokens in the rolling cache when n is read, as Xiao et al. draw it."""
    tokens = (*(_held(n - 1, window, sinks) if n else ()), n)
    return tokens if len(tokens) <= sinks + window else (*tokens[:sinks], *tokens[sinks + 1 :])


def streaming(n: int, m: int, window: int, sinks: int) -> float | None:
    """Each token is at its place in the cache."""
    held = _held(n, window, sinks)
    return held.index(n) - held.index(m) if m in held else None


def dual_chunk(n: int, m: int, chunk: int, local_window: int) -> float | None:
    stride = chunk - local_window
    blocks_between = n // stride - m // stride
    if blocks_between == 0:
        return n % stride - m % stride
    if blocks_between == 1:
        # the positions of the queries' block: s, s+1, ..., s+w-1, and then the last one again and again
        places = [*range(stride, chunk), *[chunk] * stride]
        return places[n % stride] - m % stride
    return chunk - m % stride


def string(n: int, m: int, shift: int, local_window: int) -> float | None:
    return n - m if n - m < shift else n - m - shift + local_window


NAIVE = {
    "rerope": rerope,
    "leaky-rerope": leaky_rerope,
    "self-extend": self_extend,
    "jet-long": jet_long,
    "lm-infinite": lm_infinite,
    "streaming": streaming,
    "dual-chunk": dual_chunk,
    "string": string,
}
OF_SCORES = {"score_factor", "log_n", "yarn_temperature", "llama4_temperature"}
"""Parameters that change no distance."""


def distances(method: str, tokens: int, params: dict, trained: int) -> np.ndarray:
    """ρ of every query and key, shape (tokens, tokens); NaN where a query does not see a key.

    trained: the pretraining length.
    """
    params = {key: value for key, value in params.items() if key not in OF_SCORES}
    if method == "jet-long":
        params["trained"] = trained
    table = np.full((tokens, tokens), np.nan)
    for n in range(tokens):
        for m in range(n + 1):
            seen = NAIVE[method](n, m, **params)
            if seen is not None:
                table[n, m] = seen
    return table


def score_factors(tokens: int, params: dict, trained: int) -> np.ndarray:
    """Factors of the scores of each query, shape (tokens,)."""
    factors = []
    for n in range(1, tokens + 1):
        factor = params.get("score_factor", 1.0)
        if params.get("log_n"):
            factor *= max(1.0, math.log(n) / math.log(trained))
        if params.get("yarn_temperature"):
            factor *= max(1.0, 0.1 * math.log(n / trained) + 1)
        if params.get("llama4_temperature"):
            factor *= 1 + 0.1 * math.log(1 + (n - 1) // trained)
        factors.append(factor)
    return np.array(factors)


def plain(tokens: int) -> np.ndarray:
    """n - m, and NaN for keys after the query."""
    table = np.subtract.outer(np.arange(tokens), np.arange(tokens)).astype(float)
    return np.where(table < 0, np.nan, table)
