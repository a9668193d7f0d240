"""A model with every attention computed by the formula: in float64, each query and key rotated by ρ(n, m) itself.

Nothing of ropecli computes here but the finding of the rotary tables, which are set to zero: queries and keys arrive as
the projections gave them, and one [queries × keys] matrix per head holds the scores. It reads one document at a time,
without padding and without a cache.
"""

from pathlib import Path

import numpy as np
import torch
from naive_distances import distances, plain, score_factors
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface

from ropecli.live.rotary import rotary_tables


class Reference:
    """neighbours: pair i of a head is dimensions (2i, 2i + 1), instead of (i, i + pairs); dimension 0 rotates."""

    def __init__(self, folder: Path, *, neighbours: bool = False) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
        (table,) = rotary_tables(self.model)
        self._inv_freq = torch.from_numpy(table.inv_freq)
        table.module.inv_freq.zero_()
        table.module.rope_type = "default"  # longrope computes its table again
        self._neighbours = neighbours
        self._distances, self._factors = np.zeros((0, 0)), np.ones(0)
        name = f"brute-force-{folder.name}"
        AttentionInterface.register(name, self._attend)
        AttentionMaskInterface.register(name, lambda **_: None)
        self.model.set_attn_implementation(name)

    @torch.no_grad()
    def logits(
        self, tokens: Tensor, method: str | None = None, params: dict | None = None, trained: int = 64
    ) -> Tensor:
        """tokens: shape (n,). method: None for plain attention. trained: the trained context length.

        Returns shape (n, vocabulary), float64.
        """
        self._distances = distances(method, len(tokens), params or {}, trained) if method else plain(len(tokens))
        self._factors = score_factors(len(tokens), params or {}, trained)
        return self.model(input_ids=tokens[None], use_cache=False).logits[0]

    def _attend(self, module, query, key, value, attention_mask, scaling, **options) -> tuple[Tensor, None]:
        """As transformers calls an attention function."""
        assert query.dtype == key.dtype == torch.float64
        rho, factors = self._distances, torch.from_numpy(self._factors)[:, None]
        if (window := options.get("sliding_window")) is not None:
            near = plain(len(rho))
            rho, factors = np.where(near < window, near, np.nan), 1
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = self._scores(query, key, torch.from_numpy(np.nan_to_num(rho))) * scaling * factors
        if (cap := options.get("softcap")) is not None:
            scores = cap * torch.tanh(scores / cap)
        scores = scores.masked_fill(torch.from_numpy(np.isnan(rho)), -torch.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2), None

    def _scores(self, query: Tensor, key: Tensor, rho: Tensor) -> Tensor:
        """q·R(-ρ)k for every pair of tokens: of two pairs (a, b) and (c, d), (ac + bd) cos ρθ + (ad - bc) sin ρθ."""
        width = 2 * len(self._inv_freq)
        (a, b), (c, d) = self._pairs(query[..., :width]), self._pairs(key[..., :width])
        angles = rho[..., None] * self._inv_freq
        along = torch.einsum("bhni,bhmi->bhnmi", a, c) + torch.einsum("bhni,bhmi->bhnmi", b, d)
        across = torch.einsum("bhni,bhmi->bhnmi", a, d) - torch.einsum("bhni,bhmi->bhnmi", b, c)
        still = query[..., width:] @ key[..., width:].transpose(-1, -2)
        return (along * angles.cos() + across * angles.sin()).sum(-1) + still

    def _pairs(self, rotating: Tensor) -> tuple[Tensor, Tensor]:
        if self._neighbours:
            return rotating[..., 0::2], rotating[..., 1::2]
        return rotating.chunk(2, -1)
