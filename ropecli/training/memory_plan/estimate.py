"""Estimates a training step before anything is loaded: its peak memory, part by part, and its operations.

What a step allocates comes from fake_step.py. What the optimizer and the engines hold is written down here.
"""

from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from ropecli.errors import PatchError
from ropecli.live.rotary import rotary_tables
from ropecli.training.memory_plan.fake_step import FakeStep, run_fake_step
from ropecli.training.memory_plan.model_shape import ModelShape, build, model_shape
from ropecli.training.recipe import Recipe

Engine = Literal["one", "ddp", "fsdp2", "ulysses"]
GPUS = {
    "a100": 312e12,
    "h100": 989e12,
    "h200": 989e12,
    "b200": 2250e12,
    "l40s": 362e12,
    "a6000": 155e12,
    "rtx4090": 165e12,
}
"""Dense bfloat16 operations a second, from the makers' data sheets."""
_CONTEXT = 2**30
"""Bytes that CUDA, cuBLAS and NCCL hold on a GPU beside tensors: an allowance, not a measurement."""
_FOUR_BITS = 4.127 / 8
"""Bytes per value of NF4 with doubly quantised constants (arXiv:2305.14314, section 3)."""
_EIGHT_BITS = 1 + 4 / 256
"""Bytes per value of one moment in blocks of 256 with a float32 scale each (arXiv:2110.02861)."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one process at the peak of a training step; total is the sum of the first seven.

    activations: what layers keep for the backward pass. working: everything else that the step allocates. engine:
    copies that distribution makes. runtime: an allowance for what is not tensors. host: in the CPU's memory beside a
    GPU. trained: number of parameters.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    working: int = 0
    engine: int = 0
    runtime: int = 0
    host: int = 0
    trained: int = 0

    @property
    def total(self) -> int:
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        return {name: size for name, size in asdict(self).items() if name not in ("host", "trained")}


class MemoryEstimator:
    """Estimates what training a model takes, from its config alone. Raises CheckpointError where it cannot.

    model: without values. varies: whether its rotary frequencies follow the length.
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        with torch.device("meta"):
            self.model = build(config)
            self.varies = _follows_length(self.model)
        self.shape = model_shape(self.model)
        self._steps: dict[Any, FakeStep] = {}

    def estimate(
        self, recipe: Recipe, length: int, engine: Engine = "one", world: int = 1, gpu: bool = True
    ) -> MemoryEstimate:
        """length: tokens of a whole sequence. gpu: whether an adapter's base is in bfloat16, as on a GPU."""
        step = self._step(recipe, length, engine, world, gpu)
        shards = world if engine in ("fsdp2", "ulysses") else 1
        moment = 4 if recipe.optimizer == "adamw" else _EIGHT_BITS
        constant = MemoryEstimate(
            weights=self._weights(step, recipe, engine, gpu) // shards,
            optimizer=int(2 * moment * step.trained) // shards,
            engine=_copies(step, recipe, engine),
            runtime=_CONTEXT if gpu else 0,
            trained=step.trained,
        )
        peaks = _peaks(constant, step, recipe, shards)
        if recipe.offload_activations and gpu:
            peaks = [_offloaded(one, step) for one in peaks]
        return max(peaks, key=lambda one: one.total)

    def activations(self, recipe: Recipe, length: int, engine: Engine, world: int) -> dict[str, int]:
        """Bytes that the layers keep on a GPU, by what is done about them."""
        plain, checkpointing = (
            self._step(recipe.model_copy(update={"gradient_checkpointing": on}), length, engine, world)
            for on in (False, True)
        )
        return {
            "plain": plain.kept,
            "checkpointing": checkpointing.kept,
            "offload": min(checkpointing.kept, checkpointing.hidden),
        }

    def _step(self, recipe: Recipe, length: int, engine: Engine, world: int, gpu: bool = True) -> FakeStep:
        part = -(-length // world) if engine == "ulysses" else length
        # gathered weights are in the dtype of products, and what goes from layer to layer with them
        gathered = engine in ("fsdp2", "ulysses") and recipe.mixed_precision == "bf16"
        half = gathered or (gpu and recipe.adapter != "none")
        changes = {
            "adapter": "lora" if recipe.adapter == "qlora" else recipe.adapter,  # the step is the same
            "optimizer": "adamw",
            "offload_activations": False,
        }
        asked = recipe.model_copy(update=changes)
        key = (asked.model_dump_json(), part, half)
        if key not in self._steps:
            self._steps[key] = run_fake_step(self.config, asked, part, torch.bfloat16 if half else torch.float32)
        return self._steps[key]

    def _weights(self, step: FakeStep, recipe: Recipe, engine: Engine, gpu: bool) -> int:
        size = 4.0 * step.trained
        if recipe.adapter != "none":
            frozen = max(0, self.shape.total - step.trained)
            in_four_bits = step.quantizable if recipe.adapter == "qlora" else 0
            size += (2 if gpu else 4) * (frozen - in_four_bits) + _FOUR_BITS * in_four_bits
        if engine == "ulysses" and recipe.mixed_precision == "bf16":
            size += 2 * step.trained  # DeepSpeed's bfloat16 beside its float32
        return int(size)


def _copies(step: FakeStep, recipe: Recipe, engine: Engine) -> int:
    """What an engine holds beside its share of the weights."""
    if engine == "one":
        return 0
    if engine == "ddp":
        return 4 * step.trained  # buckets of gradients
    # two layers' weights gathered, one layer's gradients before they are added up in float32 and split
    compute = 2 if recipe.mixed_precision == "bf16" else 4
    reduced = compute + 4 if recipe.adapter == "none" else 0
    return step.layer * (2 * compute + reduced) + 2 * compute * step.outside


def _peaks(constant: MemoryEstimate, step: FakeStep, recipe: Recipe, shards: int) -> list[MemoryEstimate]:
    """At the loss, in the last layer, in the first layer, and in the embeddings.

    In between memory falls or rises steadily: each layer gives back its activations, and the first of a step's passes
    leaves its gradients.
    """
    before, after = 4 * step.trained // shards, 4 * step.trained // shards
    if recipe.gradient_accumulation == 1:
        before, after = 0, 4 * step.trained_later // shards
    first = step.kept - step.kept_later
    return [
        replace(constant, gradients=before, activations=step.kept, working=step.loss - step.kept),
        replace(constant, gradients=before, activations=step.kept, working=step.layers - first),
        replace(constant, gradients=after, activations=first, working=step.layers - first),
        replace(constant, gradients=after, working=step.embeddings),
    ]


def _offloaded(peak: MemoryEstimate, step: FakeStep) -> MemoryEstimate:
    """With the activations in the CPU's memory but for one hidden state, and another on its way back."""
    on_gpu = min(peak.activations, step.hidden)
    back = min(peak.activations - on_gpu, step.hidden)
    return replace(peak, activations=on_gpu, working=peak.working + back, host=step.kept)


def _follows_length(model: Any) -> bool:
    with suppress(PatchError):  # no rotary tables at all
        return any(table.rope_type in ("dynamic", "longrope") for table in rotary_tables(model))
    return False


@dataclass(frozen=True)
class Compute:
    """Floating-point operations of one step on all processes together. recomputed: what checkpointing adds.

    Matrix products take 6 × parameters × tokens (Kaplan et al. 2020, arXiv:2001.08361, section 2.1), attention beside
    them (PaLM, Chowdhery et al. 2022, arXiv:2204.02311, appendix B), halved because it is causal. Model FLOP
    utilisation counts what the mathematics needs: what gradient checkpointing computes again is the hardware's, not
    the model's.
    """

    tokens: int
    matmul: float
    attention: float
    recomputed: float

    @property
    def flops(self) -> float:
        return self.matmul + self.attention

    def seconds(self, gpus: int, flops_per_gpu: float, mfu: float) -> float:
        return self.flops / (gpus * flops_per_gpu * mfu)


def compute_of(shape: ModelShape, recipe: Recipe, length: int, data_ranks: int) -> Compute:
    """data_ranks: processes that read different sequences."""
    tokens = recipe.batch_size * recipe.gradient_accumulation * data_ranks * length
    forward = 2.0 * shape.matmul * tokens
    attended = sum(2.0 * width * _seen(length, window or shape.sees) for width, window in shape.attention) * tokens
    passes = 3 if recipe.adapter == "none" else 2  # frozen matrices get no gradient of their own
    recomputed = forward + attended if recipe.gradient_checkpointing else 0.0
    return Compute(tokens, passes * forward, 3 * attended, recomputed)


def _seen(length: int, window: int | None) -> float:
    """Keys that a query sees, on average over the sequence."""
    if window is None or window >= length:
        return length / 2
    return window * (1 - window / (2 * length))
