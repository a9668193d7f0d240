"""The KV cache of inference: bytes at a length, in bfloat16, read off the cache that transformers itself fills."""

import copy
from typing import Any

import torch

from ropecli.errors import CheckpointError, reason_of
from ropecli.live.stock import quiet_transformers
from ropecli.training.memory_plan.anatomy import Anatomy, latent_width

_ITEM = 2


def kv_cache(config: Any, anatomy: Anatomy, length: int) -> int:
    """Bytes for one sequence of `length` tokens: layers that slide keep their window, layers that do not attend none.

    Of multi-head latent attention, what it was made to keep: the latent and the part that turns (DeepSeek-V2,
    arXiv:2405.04434, section 2.1); transformers 5 itself keeps the full keys and values. Raises CheckpointError where
    transformers makes no cache for the model.
    """
    from transformers import DynamicCache

    text = config.get_text_config()
    if latent := latent_width(text):
        return latent * _ITEM * len(anatomy.attention) * length
    try:
        with quiet_transformers(), torch.device("meta"):
            layers = DynamicCache(config=copy.deepcopy(config)).layers
    except Exception as error:  # config classes raise what they like
        raise CheckpointError(f"{config.model_type}: no KV cache can be made: {reason_of(error)}") from error
    heads = getattr(text, "num_attention_heads", None) or 1
    groups = getattr(text, "num_key_value_heads", None) or (1 if getattr(text, "multi_query", False) else heads)
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    windows = [window for _, window in anatomy.attention]
    if len(layers) == len(anatomy.kinds) and len(windows) == len(layers):
        windows = [
            getattr(layer, "sliding_window", None) or window for layer, window in zip(layers, windows, strict=True)
        ]
    return sum(2 * groups * width * _ITEM * min(length, window or length) for window in windows)
