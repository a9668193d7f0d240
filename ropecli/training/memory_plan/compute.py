"""Floating-point operations of a training step, and its time at a given utilisation.

Matrix products by 6 × parameters × tokens (Kaplan et al. 2020, arXiv:2001.08361, section 2.1), attention beside them
(PaLM, Chowdhery et al. 2022, arXiv:2204.02311, appendix B), halved because it is causal. Of both, model FLOP
utilisation counts what the mathematics needs: what gradient checkpointing computes again is the hardware's, not the
model's.
"""

from dataclasses import dataclass

from ropecli.training.memory_plan.anatomy import Anatomy
from ropecli.training.recipe import Recipe

GPUS = {
    "a100": 312e12,
    "h100": 989e12,
    "h200": 989e12,
    "b200": 2250e12,
    "l40s": 362e12,
    "a6000": 155e12,
    "rtx4090": 165e12,
}
"""Dense bfloat16 operations a second, of the makers' data sheets."""


@dataclass(frozen=True)
class Compute:
    """Of one step on all processes together. recomputed: what checkpointing adds, for the hardware alone."""

    tokens: int
    matmul: float
    attention: float
    recomputed: float

    @property
    def flops(self) -> float:
        return self.matmul + self.attention

    def seconds(self, gpus: int, flops_per_gpu: float, mfu: float) -> float:
        return self.flops / (gpus * flops_per_gpu * mfu)


def compute_of(anatomy: Anatomy, recipe: Recipe, length: int, data_ranks: int) -> Compute:
    """data_ranks: processes that read different sequences."""
    tokens = recipe.batch_size * recipe.gradient_accumulation * data_ranks * length
    forward = 2.0 * anatomy.matmul * tokens
    attended = sum(2.0 * width * _seen(length, window or anatomy.sees) for width, window in anatomy.attention) * tokens
    passes = 3 if recipe.adapter == "none" else 2  # frozen matrices get no gradient of their own
    recomputed = forward + attended if recipe.gradient_checkpointing else 0.0
    return Compute(tokens, passes * forward, 3 * attended, recomputed)


def _seen(length: int, window: int | None) -> float:
    """Keys that a query sees, on average over the sequence."""
    if window is None or window >= length:
        return length / 2
    return window * (1 - window / (2 * length))
