"""Estimates a training step's peak memory, part by part, and its operations, from the config only.

fake_step.py counts what a step allocates. The memory of the optimizer and the engines is calculated here.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Linear

from ropecli.config.layers import CHUNKED, OTHER, RECURRENT, SLIDING
from ropecli.config.settings import read_settings
from ropecli.evaluation.protocols import short_context
from ropecli.live.skeleton import CHOSEN_EXPERTS, EXPERTS, build_model, decoder_layers
from ropecli.live.tensors import ties_head
from ropecli.training.launch import Launch
from ropecli.training.memory_plan.fake_step import FakeStep, FakeSteps, count_values
from ropecli.training.recipe_schema import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ONE = Launch()
_CONTEXT = 2**30
"""Bytes that CUDA, cuBLAS and NCCL hold on a GPU in addition to tensors: an allowance, not a measurement."""
_USABLE = 0.9
_FOUR_BITS = 4.127 / 8
"""Bytes per value of NF4 with doubly quantised constants (arXiv:2305.14314, section 3)."""
_EIGHT_BITS = 1 + 4 / 256
"""Bytes per value of one moment in blocks of 256 with a float32 scale each (arXiv:2110.02861)."""


@dataclass(frozen=True)
class ModelShape:
    """Numbers of values. total: parameters, tied ones once. active: parameters used per token.

    matmul: in the matrices that a token is multiplied by, with the head but without the embeddings. attention: for each
    attention layer, heads × (query width + value width), and the window in tokens or None.
    """

    total: int
    active: int
    matmul: int
    attention: tuple[tuple[int, int | None], ...]


def model_shape(model: "PreTrainedModel") -> ModelShape:
    text = model.config.get_text_config()
    embeddings: Any = model.get_input_embeddings()
    experts, chosen = (
        next((value for key in keys if (value := getattr(text, key, None))), None) for keys in (EXPERTS, CHOSEN_EXPERTS)
    )
    share = chosen / experts if experts and chosen else 1.0  # of the experts' parameters, used per token
    total = active = matmul = 0
    for name, parameter in model.named_parameters():
        used = round(parameter.numel() * (share if "experts" in name.split(".") else 1.0))
        total += parameter.numel()
        active += used
        if parameter.ndim >= 2 and parameter is not embeddings.weight:
            matmul += used
    if ties_head(model):
        matmul += embeddings.weight.numel()
    return ModelShape(total, active, matmul, tuple(_attention(text)))


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one process at the peak of a training step; total is the sum of the first seven.

    activations: kept by the decoder for the backward pass. working: all other allocations of the step. engine: copies
    made by the engine. runtime: an allowance for CUDA. host: activations offloaded to CPU memory. trained: number of
    parameters.
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
        return {name: size for name, size in vars(self).items() if name not in ("host", "trained")}


class MemoryEstimator:
    """Estimates the memory of training a model. Raises CheckpointError if it cannot.

    gpu: whether training runs on one, where an adapter's base is in bfloat16. model: on the meta device.
    """

    def __init__(self, config: Any, *, gpu: bool = True) -> None:
        self.gpu = gpu
        self.model = build_model(config, dtype=torch.float32)
        self.shape = model_shape(self.model)
        layers = decoder_layers(self.model)
        self._layer = max(count_values(layer.parameters()) for layer in layers)
        self._outside = self.shape.total - count_values(layers.parameters())
        self._matrices = count_values(part.weight for part in layers.modules() if isinstance(part, Linear))
        self.fake_steps = FakeSteps(self.model)
        self._steps: dict[Any, FakeStep] = {}

    def estimate(self, recipe: Recipe, length: int, launch: Launch = ONE) -> MemoryEstimate:
        """length: tokens of the whole sequence.

        gradient_checkpointing: auto counts as true; see resolve_checkpointing.
        """
        shards = launch.world if launch.shards else 1
        step = self._step(recipe, length, launch)
        peak = max(step.peaks, key=sum)
        moment = 4 if recipe.optimizer == "adamw" else _EIGHT_BITS
        return MemoryEstimate(
            weights=self._weights(step, recipe) // shards,
            gradients=peak.gradients // (shards if recipe.gradient_accumulation > 1 else 1),
            optimizer=int(2 * moment * step.trained) // shards,
            activations=peak.activations,
            working=peak.working,
            engine=self._copies(step, recipe, launch),
            runtime=_CONTEXT if self.gpu else 0,
            host=step.host,
            trained=step.trained,
        )

    def resolve_checkpointing(self, recipe: Recipe, length: int, launch: Launch, memory: int) -> Recipe:
        """Replace gradient_checkpointing: auto by false if a step without it takes at most 90% of `memory`, else true.

        memory: bytes of one device. The rest is left for fragmentation and for errors of the estimate.
        """
        if recipe.gradient_checkpointing != "auto":
            return recipe
        without = recipe.model_copy(update={"gradient_checkpointing": False})
        fits = not recipe.offload_activations and self.estimate(without, length, launch).total <= _USABLE * memory
        return without if fits else recipe.model_copy(update={"gradient_checkpointing": True})

    def _step(self, recipe: Recipe, length: int, launch: Launch) -> FakeStep:
        """The step of one process, which is run once for all recipes and launches that take the same."""
        part = -(-length // launch.sequence_ranks)
        # gathered weights have the compute dtype, and so do hidden states
        gathered = launch.shards and recipe.mixed_precision == "bf16"
        half = gathered or (self.gpu and recipe.adapter != "none")
        same = {
            "adapter": "lora" if recipe.adapter == "qlora" else recipe.adapter,
            "optimizer": "adamw",
            "offload_activations": recipe.offload_activations and self.gpu,
            "gradient_checkpointing": bool(recipe.gradient_checkpointing),
        }
        recipe = recipe.model_copy(update=same)
        # gradients of an earlier pass are there all the time, so that one step shows those of all shares
        shards = launch.world if launch.shards and recipe.gradient_accumulation == 1 else 1
        dtype = torch.bfloat16 if half else torch.float32
        step = (part, dtype, shards, launch.sequence_ranks)
        key = (recipe.model_dump_json(), *step)
        if key not in self._steps:
            self._steps[key] = self.fake_steps.run(recipe, *step)
        return self._steps[key]

    def _weights(self, step: FakeStep, recipe: Recipe) -> int:
        size = 4.0 * step.trained
        if recipe.adapter != "none":
            frozen = max(0, self.shape.total - step.trained)
            in_four_bits = self._matrices if recipe.adapter == "qlora" else 0
            size += (2 if self.gpu else 4) * (frozen - in_four_bits) + _FOUR_BITS * in_four_bits
        return int(size)

    def _copies(self, step: FakeStep, recipe: Recipe, launch: Launch) -> int:
        """Bytes that an engine holds in addition to its share of the weights."""
        if not launch.shards:
            return 4 * step.trained if launch.world > 1 else 0  # gradient buckets
        # gathered weights of two layers, and one layer's gradients before and after reduction in float32
        compute = 2 if recipe.mixed_precision == "bf16" else 4
        reduced = compute + 4 if recipe.adapter == "none" else 0
        return self._layer * (2 * compute + reduced) + 2 * compute * self._outside


def flops_of(shape: ModelShape, recipe: Recipe, length: int, tokens: int, pretraining_length: int) -> float:
    """Floating-point operations of training on `tokens` tokens, in sequences of `length`.

    Matrix products take 6 × parameters × tokens (Kaplan et al. 2020, arXiv:2001.08361, section 2.1). Attention is added
    (PaLM, Chowdhery et al. 2022, arXiv:2204.02311, appendix B) and halved because it is causal. Recomputation by
    gradient checkpointing is not counted, as in model FLOP utilisation. longce also reads its windows forward.
    """

    def attended(length: int) -> float:
        seen = [(width, min(length, window or length)) for width, window in shape.attention]
        # the average number of keys that a query attends to
        return sum(width * keys * (1 - keys / (2 * length)) for width, keys in seen)

    passes = 3 if recipe.adapter == "none" else 2  # frozen matrices get no weight gradient
    windows = short_context(pretraining_length).windows(length) if recipe.loss == "longce" else ()
    read = sum((stop - start) / length * (shape.matmul + attended(stop - start)) for start, stop in windows)
    return 2.0 * tokens * (passes * shape.matmul + 3 * attended(length) + read)


def _attention(config: Any) -> Iterator[tuple[int, int | None]]:
    settings = read_settings(json.loads(config.to_json_string(use_diff=False)))
    # the configs of the layers, which may differ; before transformers 5.23 they do not
    configs = getattr(config, "per_layer_config", None) or repeat(config)
    for layer, layer_config in zip(settings.layers, configs, strict=False):
        if layer.attention not in (RECURRENT, OTHER):
            yield (
                _width(layer_config) * (1 + settings.family.two_attentions),
                layer.window if layer.attention in (SLIDING, CHUNKED) else None,
            )


def _width(config: Any) -> int:
    """heads × (query width + value width)."""
    heads = getattr(config, "num_attention_heads", None) or 1
    if getattr(config, "kv_lora_rank", None):
        return heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    return heads * 2 * (getattr(config, "head_dim", None) or config.hidden_size // heads)
