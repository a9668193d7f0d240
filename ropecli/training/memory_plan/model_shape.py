"""Reads the sizes of a model and of its KV cache from the model that transformers builds, without weights."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ropecli.config.layers import BFLOAT16, CHUNKED, OTHER, RECURRENT, SLIDING, cached_values
from ropecli.config.settings import read_settings
from ropecli.errors import CheckpointError, reason_of
from ropecli.live.stock_transformers import auto_class_of, quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_top_k", "moe_topk", "moe_k")


def build(config: Any, dtype: torch.dtype = torch.float32) -> "PreTrainedModel":
    """Build the model of a config. Call it under torch.device("meta"). Raises CheckpointError."""
    auto_class = auto_class_of(config)
    try:
        with quiet_transformers():
            return auto_class.from_config(config, trust_remote_code=False, dtype=dtype)
    except Exception as error:  # config classes raise any type of error
        raise CheckpointError(f"transformers cannot build a model from this config: {reason_of(error)}") from error


@dataclass(frozen=True)
class ModelShape:
    """Numbers of values. total: parameters, tied ones once. active: parameters used per token.

    matmul: in the matrices that a token is multiplied by, with the head but without the embeddings. attention: for each
    attention layer, heads × (query width + value width), the values that it caches per token, and the window in tokens
    or None.
    """

    total: int
    active: int
    matmul: int
    attention: tuple[tuple[int, int, int | None], ...]


def model_shape(model: "PreTrainedModel") -> ModelShape:
    text = model.config.get_text_config()
    head: Any = model.get_output_embeddings()
    embeddings: Any = model.get_input_embeddings()
    experts, chosen = (
        next((value for key in keys if (value := getattr(text, key, None))), None) for keys in (_EXPERTS, _CHOSEN)
    )
    share = chosen / experts if experts and chosen else 1.0  # of the experts' parameters, used per token
    total = active = matmul = 0
    for name, parameter in model.named_parameters():
        used = round(parameter.numel() * (share if "experts" in name.split(".") else 1.0))
        total += parameter.numel()
        active += used
        if parameter.ndim >= 2 and parameter is not embeddings.weight:
            matmul += used
    if head is not None and head.weight is embeddings.weight:
        matmul += head.weight.numel()
    return ModelShape(total, active, matmul, tuple(_attention(text)))


def layers_of(model: "PreTrainedModel") -> tuple[nn.Module, str, nn.ModuleList]:
    """(parent module, attribute name, decoder layers). Raises CheckpointError."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return module, name, child
    raise CheckpointError(f"Cannot estimate the memory of {type(model).__name__}: found no list of {count} layers.")


def kinds_of_layers(model: "PreTrainedModel") -> list[list[int]]:
    """Group layers by kind: the same shapes of parameters and the same type of attention."""
    labels = getattr(model.config.get_text_config(), "layer_types", None) or []
    kinds: dict[Any, list[int]] = {}
    for index, layer in enumerate(layers_of(model)[2]):
        shapes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
        kinds.setdefault((type(layer), shapes, *labels[index : index + 1]), []).append(index)
    return list(kinds.values())


def keep_layers(model: "PreTrainedModel", kept: list[int]) -> None:
    """Remove all other layers of the decoder."""
    holder, name, layers = layers_of(model)
    config = model.config.get_text_config()
    setattr(holder, name, nn.ModuleList(layers[index] for index in kept))
    for position, index in enumerate(kept):
        for module in layers[index].modules():
            if hasattr(module, "layer_idx"):
                setattr(module, "layer_idx", position)  # noqa: B010  (mypy expects a module)
    if labels := getattr(config, "layer_types", None):
        config.layer_types = [labels[index] for index in kept]
    config.num_hidden_layers = len(kept)


def _attention(config: Any) -> Iterator[tuple[int, int, int | None]]:
    section = json.loads(config.to_json_string(use_diff=False))
    settings = read_settings(section)
    cached = cached_values(section, settings.family, settings.layers)
    # the configs of the layers, which may differ; before transformers 5.23 they do not
    configs = getattr(config, "per_layer_config", None) or repeat(config)
    for layer, values, own in zip(settings.layers, cached, configs, strict=False):
        if layer.attention not in (RECURRENT, OTHER):
            yield (
                _width(own) * (1 + settings.family.two_attentions),
                values,
                layer.window if layer.attention in (SLIDING, CHUNKED) else None,
            )


def _width(config: Any) -> int:
    """heads × (query width + value width)."""
    heads = getattr(config, "num_attention_heads", None) or 1
    if getattr(config, "kv_lora_rank", None):
        return heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    return heads * 2 * (getattr(config, "head_dim", None) or config.hidden_size // heads)


def kv_cache(shape: ModelShape, length: int) -> int:
    """Bytes for one sequence of `length` tokens. Layers with a sliding window keep only the window."""
    return sum(BFLOAT16 * values * min(length, window or length) for _, values, window in shape.attention)
