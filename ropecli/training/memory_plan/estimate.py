"""Estimates a training step before anything is loaded: its peak memory, part by part, and its operations.

A step passes six moments, any of which may be the peak: the loss, the head's gradient, the last layers', the
first layer's, the embeddings', the optimizer's step. What a decoder keeps and works with comes from trace.py; what
the chunked loss and AdamW hold is written down here, as scripts/bench_plan.py measures it.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch

from ropecli.errors import CheckpointError, PatchError, RopecliError, reason_of
from ropecli.live.lm_head import SplitModel
from ropecli.live.rotary import rotary_tables
from ropecli.training import loss as chunked
from ropecli.training.memory_plan.model_shape import ModelShape, build, model_shape
from ropecli.training.memory_plan.trace import Trace, trace
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
"""Dense bfloat16 operations a second, of the makers' data sheets."""
_CONTEXT = 2**30
"""Bytes that CUDA, cuBLAS and NCCL hold on a GPU beside tensors: an allowance, not a measurement."""
_FOUR_BITS = 4.127 / 8
"""Bytes per value of NF4 with doubly quantised constants (arXiv:2305.14314, section 3)."""
_EIGHT_BITS = 1 + 4 / 256
"""Bytes per value of one moment in blocks of 256 with a float32 scale each (arXiv:2110.02861)."""
_PLAIN = {
    "mm",
    "t",
    "transpose",
    "view",
    "_unsafe_view",
    "slice",
    "alias",
    "detach",
    "empty",
    "new_zeros",
    "zeros",
    "matmul",
}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one process at the peak of a training step; total is their sum. moment: when that is.

    activations: what layers keep for the backward pass. working: what one layer, or the optimizer, needs while it is
    at work. engine: copies that distribution makes. runtime: an allowance for what is not tensors. host: in the
    CPU's memory beside a GPU, not in the total.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    working: int = 0
    loss: int = 0
    engine: int = 0
    runtime: int = 0
    moment: str = ""
    trained: int = field(default=0, metadata={"bytes": False})
    host: int = field(default=0, metadata={"bytes": False})

    @property
    def total(self) -> int:
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        counted = [one.name for one in fields(self) if one.type == "int" or one.type is int]
        return {name: int(getattr(self, name)) for name in counted if name not in ("trained", "host")}


class MemoryEstimator:
    """Estimates what training a model takes, from its config alone. Raises CheckpointError where it cannot.

    model: without values. varies: whether its rotary frequencies follow the length.
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        with torch.device("meta"):
            self.model = build(config)
            try:
                self.shape: ModelShape = model_shape(self.model)
                self.plain_head = _Weightless(self.model).plain_head
                self.varies = _follows_length(self.model)
            except RopecliError:
                raise
            except Exception as error:  # some configs refuse to be asked, some heads to run alone
                raise CheckpointError(f"{config.model_type}: its shapes are not known: {reason_of(error)}") from error
        self._traces: dict[Any, Trace] = {}

    def estimate(
        self, recipe: Recipe, length: int, engine: Engine = "one", world: int = 1, gpu: bool = True
    ) -> MemoryEstimate:
        """length: tokens of a whole sequence. gpu: whether adapters' bases are in bfloat16, and more, as on a GPU."""
        parted = -(-length // world) if engine == "ulysses" else length
        seen = self.trace(recipe, parted, engine, gpu)
        fixed = self._fixed(seen, recipe, engine, world, gpu)
        return max(self._moments(fixed, seen, recipe, parted, engine, world, gpu), key=lambda estimate: estimate.total)

    def trace(self, recipe: Recipe, length: int, engine: Engine = "one", gpu: bool = True) -> Trace:
        """length: tokens on one process."""
        frozen = gpu and recipe.adapter != "none"
        # gathered weights are in the dtype of products, and what goes from layer to layer with them
        gathered = engine in ("fsdp2", "ulysses") and recipe.mixed_precision == "bf16"
        dtype = torch.bfloat16 if frozen or gathered else torch.float32
        adapter = "lora" if recipe.adapter == "qlora" else recipe.adapter
        key = (
            *(adapter, recipe.lora_rank, recipe.lora_targets, recipe.gradient_checkpointing, recipe.batch_size),
            *(recipe.mixed_precision, recipe.attn, length, dtype),
            any(source.sequences == "packed" for source in recipe.sources),
        )
        if key not in self._traces:
            asked = recipe.model_copy(update={"adapter": adapter})
            self._traces[key] = trace(self.config, self.shape, asked, length, dtype)
        return self._traces[key]

    def _fixed(self, seen: Trace, recipe: Recipe, engine: Engine, world: int, gpu: bool) -> MemoryEstimate:
        """Weights, gradients, optimizer state: all that does not depend on the sequence."""
        frozen = max(0, self.shape.total - seen.trained) if recipe.adapter != "none" else 0
        weights = 4 * seen.trained + (2 if gpu else 4) * frozen
        if recipe.adapter == "qlora":
            weights = int(4 * seen.trained + 2 * (frozen - seen.quantizable) + _FOUR_BITS * seen.quantizable)
        moment = 4 if recipe.optimizer == "adamw" else _EIGHT_BITS
        compute = 2 if recipe.mixed_precision == "bf16" else 4
        shards, copies = 1, 0
        if engine == "ddp":
            copies = 4 * seen.trained  # buckets
        elif engine in ("fsdp2", "ulysses"):
            shards = world
            # two layers' weights gathered, one layer's gradients before they are added up in float32 and split
            reduced = compute + 4 if recipe.adapter == "none" else 0
            copies = seen.layer * (2 * compute + reduced) + 2 * compute * seen.outside
        if engine == "ulysses" and compute == 2:
            weights += 2 * seen.trained  # DeepSpeed's bfloat16 beside its float32
        return MemoryEstimate(
            weights=weights // shards,
            gradients=4 * seen.trained // shards,
            optimizer=int(2 * moment * seen.trained) // shards,
            engine=copies,
            runtime=_CONTEXT if gpu else 0,
            trained=seen.trained,
        )

    def _moments(
        self, fixed: MemoryEstimate, seen: Trace, recipe: Recipe, length: int, engine: Engine, world: int, gpu: bool
    ) -> Iterator[MemoryEstimate]:
        first_pass = recipe.gradient_accumulation == 1  # the gradients come to be on the way
        kept, host = seen.kept, 0
        if recipe.offload_activations and gpu:
            kept, host = min(seen.kept, seen.hidden), seen.kept
        matrix = 4 * self.shape.vocabulary * self.shape.width
        head = matrix if seen.head_trained else 0
        before = replace(fixed, gradients=0 if first_pass else fixed.gradients, host=host, activations=kept)
        during, after = self._loss(recipe.batch_size * length, matrix, seen, gpu)
        # autocast's copies of the weights; where weights are gathered layer by layer, none stays
        copies = 0 if engine in ("fsdp2", "ulysses") else seen.forward
        yield replace(before, moment="the loss", working=copies, loss=during)
        yield replace(before, moment="the head's gradient", loss=after)
        ahead = head if first_pass or self.shape.tied else 0
        back = seen.hidden if host else 0
        yield replace(before, moment="the last layers' gradients", working=seen.working + back, loss=ahead)
        if first_pass:
            # by the first layer, all gradients but the embeddings' are there, and no activations are
            late = fixed.gradients - (0 if self.shape.tied or not seen.embeddings_trained else matrix)
            yield replace(
                fixed, moment="the first layer's gradient", gradients=max(0, late), working=seen.working, host=host
            )
        if seen.embeddings_trained:
            beyond = self._beyond(matrix, first_pass)
            yield replace(fixed, moment="the embeddings' gradient", working=max(0, seen.embedding + beyond), host=host)
        yield replace(fixed, moment="the optimizer's step", host=host)

    def _loss(self, tokens: int, matrix: int, seen: Trace, gpu: bool) -> tuple[int, int]:
        """Bytes while the loss is computed, and while its gradient comes to the head."""
        rows = min(tokens, chunked._CHUNK, max(1, chunked._LOGITS // self.shape.vocabulary))
        logits = 4 * rows * self.shape.vocabulary
        hidden = 4 * tokens * self.shape.width
        copies = (hidden if seen.output_itemsize < 4 else 0) + (matrix if gpu and not seen.head_trained else 0)
        head = matrix if seen.head_trained else 0
        if self.plain_head:
            return hidden + head + logits + copies, hidden + 2 * head
        return 2 * logits + copies, max(4 * logits + head, 3 * head) + 2 * hidden + copies

    def _beyond(self, matrix: int, first_pass: bool) -> int:
        """What joins the embeddings' gradient: of a tied matrix the head's, which has waited for it."""
        if not self.shape.tied:
            return -matrix if first_pass else 0
        return (0 if first_pass else matrix) + (0 if self.plain_head else matrix)


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


class _Output:
    """A decoder's output of hidden states; whatever else is asked of it is None."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _Weightless(SplitModel):
    """Its head is plain if one product is all that it does: there are no values to try it with."""

    def _probe(self) -> bool:
        from torch.utils._python_dispatch import TorchDispatchMode

        done = []

        class Operations(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                done.append(func.overloadpacket.__name__)
                return func(*args, **(kwargs or {}))

        weight = self.head.weight
        hidden = torch.empty(1, 2, weight.shape[1], dtype=weight.dtype, device=weight.device)
        with torch.no_grad(), Operations():
            self.logits(_Output(hidden), hidden)
        return not set(done) - _PLAIN


def _follows_length(model: Any) -> bool:
    with suppress(PatchError):  # no rotary tables at all
        return any(table.rope_type in ("dynamic", "longrope") for table in rotary_tables(model))
    return False
