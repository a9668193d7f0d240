"""Sequences that several processes share by parts.

axolotl-ringmaster provides it: around attention, processes exchange parts of the sequence for heads (Ulysses, Jacobs et
al. 2023, arXiv:2309.14509). That attention knows windows and documents but no mask, and rotary tables that depend on
the length would use each process's part of it. So what would silently train something else is refused.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from ropecli.config.layers import SLIDING
from ropecli.config.saved_remapping import method_of
from ropecli.config.settings import read_settings
from ropecli.data.stream import Batch
from ropecli.errors import RecipeError
from ropecli.live.rotary import FOLLOWS_LENGTH, rotary_tables
from ropecli.training.recipe_schema import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WINDOW = "sliding_window"
_SHARED = "ropecli_shared"
"""Name in transformers of attention that processes share."""
SHAREABLE = {
    *("apertus", "arcee", "aria_text", "bitnet", "cohere", "ernie4_5", "ernie4_5_moe", "flex_olmo", "gemma"),
    *("gemma3_text", "gemma4_text", "glm", "glm4", "glm4_moe", "gpt_neox", "granite", "granitemoe", "helium"),
    *("hunyuan_v1_dense", "llama", "minimax_m2", "ministral", "ministral3", "mistral", "mixtral", "nemotron", "olmo"),
    *("olmo2", "olmo3", "olmoe", "persimmon", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"),
    "starcoder2",
}
"""Types of text models whose loss and gradients on two processes that share sequences were those of one."""
_LONGEST_MASK = 2**13
"""Tokens of a shared sequence with a mask: of grouped keys torch then computes all scores, some GiB for more tokens."""


def share_attention(model: Any, size: int, groups: int, device: str) -> None:
    """Let attention see whole sequences. It raises RecipeError when it is called with what would be lost.

    size: number of processes that share a sequence. groups: of such processes. device: type of theirs.
    """
    import ringmaster
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import repeat_kv

    text = model.config.get_text_config()
    mesh = init_device_mesh(device, (groups, size), mesh_dim_names=("data", "cp"))
    runtime = ringmaster.setup(
        ringmaster.RingmasterConfig(size, ringmaster.Backend.ULYSSES),
        device_mesh=mesh,
        device_type=device,
        inner_attn=text._attn_implementation,
    )
    shared = AttentionInterface()[cast(str, runtime.attn_implementation)]
    layers = read_settings(model.config.to_dict()).layers
    windows = [layer.window if layer.attention == SLIDING else None for layer in layers]

    def attend(
        module: Any, query: Any, key: Any, value: Any, mask: Any, position_ids: Any = None, **arguments: Any
    ) -> Any:
        # without positions, in whose gaps flash attention sees document boundaries
        tokens, passed = query.shape[2] * size, arguments.get("sliding_window") or getattr(module, _WINDOW, None)
        # ringmaster 0.2.7 loses other arguments of attention, and windows that are only in the mask
        lost = [name for name in ("s_aux", "softcap", "position_bias") if arguments.get(name) is not None]
        if len({min(window or tokens, tokens) for window in (passed, windows[module.layer_idx])}) > 1:
            lost.append(_WINDOW)
        if lost:
            raise RecipeError(
                f"context_parallel_size {size} would lose {lost[0]} of {type(module).__name__}. Set it to 1."
            )
        if key.shape[1] % size:
            key, value = (repeat_kv(tensor, repeats(tensor, size)) for tensor in (key, value))
            module.num_key_value_groups = query.shape[1] // key.shape[1]  # transformers repeats wide heads by it
        return shared(module, query, key, value, mask, **arguments)

    AttentionInterface.register(_SHARED, attend)
    model.set_attn_implementation(_SHARED if text is model.config else {"text_config": _SHARED})


def part_of(batch: Batch, rank: int, ranks: int) -> Batch:
    """The part of a batch that one of the processes takes; all pass it forward and backward before the next.

    It is packed, since shared attention takes no mask.
    """
    from ringmaster.runtime import get_runtime
    from ringmaster.shard import varlen_meta

    length = batch.ids.shape[1]
    positions = np.broadcast_to(np.arange(length), batch.ids.shape) if batch.positions is None else batch.positions
    # attention reads it, also when the backward pass recomputes it
    get_runtime().varlen = varlen_meta(torch.tensor(positions), length) if batch.packed else None
    part = slice(rank * length // ranks, (rank + 1) * length // ranks)
    counts = None if batch.document_labels is None else batch.document_labels[:, part]
    return Batch(batch.ids[:, part], batch.labels[:, part], positions[:, part], True, counts)


def repeats(tensor: torch.Tensor, ranks: int) -> int:
    """How often to repeat the heads of keys or values, dimension 1, so that each process has as many."""
    heads = tensor.shape[1]
    return math.lcm(heads, ranks) // heads


def sharing_faults(size: int, model: "PreTrainedModel", recipe: Recipe, length: int) -> Iterator[str]:
    """Yield why `size` processes cannot share the sequences of a recipe."""
    name, hint = f"context_parallel_size {size}", "Set context_parallel_size to 1."
    if length % size:
        yield f"--length is {length}; expected a multiple of {size} for {name}."
    if recipe.loss == "longce":
        yield f"loss: longce needs whole sequences on each process, but {name} splits them. {hint}"
    config: Any = model.config.get_text_config()
    if method := method_of(config._attn_implementation):
        # its mask function would treat a process's part of the row as the whole row
        yield f"{method} needs whole sequences on each process, but {name} splits them. {hint}"
        return
    if config.model_type not in SHAREABLE:
        yield f"{name} does not support the model type {config.model_type}. {hint}"
        return
    if any(table.rope_type in FOLLOWS_LENGTH for table in rotary_tables(model)):
        # every process would use the largest position of its own part
        yield f"the model's rotary frequencies depend on the length, which {name} splits over processes. {hint}"
    attention = config._attn_implementation if recipe.attn == "auto" else recipe.attn
    flash, heads = "flash" in attention, config.num_attention_heads
    layers = read_settings(model.config.to_dict()).layers
    masked = recipe.packs or any(layer.attention == SLIDING and (layer.window or 0) < length for layer in layers)
    if not flash and attention != "sdpa":
        yield f"attn: {attention} does not support {name}. Use attn: sdpa or flash_attention_2."
    elif masked and not flash and length > _LONGEST_MASK:
        what = f"a mask of {length} × {length} for packed sequences and windows"
        yield f"attn: {attention} needs {what}. Use attn: flash_attention_2."
    if heads % size:
        yield f"{heads} attention heads cannot be divided by {name}. Set it to {math.gcd(heads, size)}."
