"""Refuses what an engine, a model or a distance method cannot train, before training starts.

Most of these would silently train something else: attention that processes share knows windows and documents but no
mask, and rotary tables that depend on the length would use each process's part of it.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ropecli.config.layers import RECURRENT, SLIDING
from ropecli.config.saved_remapping import SavedRemapping, method_of
from ropecli.config.settings import read_settings
from ropecli.errors import RecipeError
from ropecli.evaluation.protocols import short_context
from ropecli.live.rotary import varying_tables
from ropecli.training.launch import Launch
from ropecli.training.recipe_schema import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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


def weighed_from(recipe: Recipe, pretraining_length: int) -> int | None:
    """Tokens before a token from which the loss weighs it; None if it weighs all alike."""
    return short_context(pretraining_length).tokens if recipe.loss == "longce" else None


def refuse_unsuitable(launch: Launch, model: "PreTrainedModel", recipe: Recipe, length: int) -> None:
    """Raise RecipeError listing what this launch cannot train. length: tokens per sequence."""
    faults: list[str] = []
    if recipe.loss == "longce" and varying_tables(model, length):
        faults.append(
            "loss: longce compares contexts of different lengths, but the model's rotary frequencies depend on the "
            "length. Use loss: next-token."
        )
    if recipe.packs and recipe.batch_size > 1 and "flash" in model.config.get_text_config()._attn_implementation:
        # transformers' _is_packed_sequence
        faults.append(
            "flash attention separates packed documents in a batch of one sequence only. Use --batch-size 1, and "
            "--gradient-accumulation for the rest."
        )
    integers = any(not parameter.is_floating_point() for parameter in model.parameters())
    context_length = getattr(model.config.get_text_config(), "max_position_embeddings", 1)
    varies = launch.sequence_ranks > 1 and bool(varying_tables(model, max(length, context_length)))
    faults += launch_faults(launch, model, recipe, length, integers=integers, varies=varies)
    if faults:
        raise RecipeError(
            "\n  ".join(["This recipe cannot be trained with this model and launch configuration:", *faults])
        )


def launch_faults(
    launch: Launch, model: "PreTrainedModel", recipe: Recipe, length: int, *, integers: bool, varies: bool
) -> Iterator[str]:
    """Yield why a recipe cannot train with sharded weights or shared sequences, one sentence each.

    model: may be on the meta device. integers: whether some weights are integers, such as 4-bit weights. varies:
    whether rotary frequencies depend on the length.
    """
    if launch.shards and recipe.optimizer == "adamw-8bit":
        # its kernels do not support sharded tensors: bitsandbytes issue 1633, illegal memory access
        yield "optimizer: adamw-8bit does not support FSDP2's sharded weights. Use adamw."
    if launch.shards and integers:
        # peft's guide to FSDP: bnb_4bit_quant_storage must be a floating dtype
        hint = "Use DDP (MULTI_GPU), or --adapter lora."
        yield f"--adapter {recipe.adapter} stores weights as integers, which FSDP2 cannot shard. {hint}"
    if launch.sequence_ranks > 1:
        yield from _shared_sequence_faults(launch, model, recipe, length, varies=varies)


def _shared_sequence_faults(
    launch: Launch, model: "PreTrainedModel", recipe: Recipe, length: int, *, varies: bool
) -> Iterator[str]:
    """Yield why processes cannot share the sequences of a recipe."""
    size = launch.sequence_ranks
    name, hint = f"context_parallel_size {size}", "Set context_parallel_size to 1."
    if length % size:
        yield f"--length is {length}; expected a multiple of {size} for {name}."
    if recipe.loss == "longce":
        yield f"loss: longce needs whole sequences on each process, but {name} splits them. {hint}"
    if varies:
        # every process would use the largest position of its own part
        yield f"the model's rotary frequencies depend on the length, which {name} splits over processes. {hint}"
    config: Any = model.config.get_text_config()
    if method := method_of(config._attn_implementation):
        # its mask function would treat a process's part of the row as the whole row
        yield f"{method} needs whole sequences on each process, but {name} splits them. {hint}"
        return
    if config.model_type not in SHAREABLE:
        yield f"{name} does not support the model type {config.model_type}. {hint}"
        return
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


def why_unpackable(recipe: Recipe, config: dict[str, Any], saved: SavedRemapping | None) -> str:
    """Why this recipe, model or launch cannot pack conversations side by side; empty if nothing is known against it."""
    if recipe.positions != "full":
        return f"--positions {recipe.positions}"
    if saved is not None:
        return f"{saved.method} does not support packed documents"
    if recipe.context_parallel_size > 1 and "flash" not in recipe.attn:
        return f"with attn: {recipe.attn}, shared sequences need a mask of tokens × tokens"
    if any(layer.attention == RECURRENT for layer in read_settings(config).layers):
        return "the model's layers carry a state along the sequence"
    return ""


def refuse_method_conflicts(recipe: Recipe, saved: SavedRemapping | None) -> None:
    """Raise RecipeError for settings that a distance method would ignore or silently break.

    A distance method counts the tokens of a row, ignores position_ids, and needs its own attention.
    """
    if saved is None:
        return
    method, faults = saved.method, []
    if recipe.positions != "full":
        faults.append(f"--positions {recipe.positions} has no effect, since {method} ignores position_ids. Use full.")
    if recipe.packs:
        faults.append(
            f"--sequences packed needs separate documents in a row, which {method} does not support. Use long or "
            "concat."
        )
    if recipe.attn != "auto":
        faults.append(f"attn: {recipe.attn} would replace {method}'s own attention. Use attn: auto.")
    if faults:
        raise RecipeError("\n  ".join([f"{method} cannot be trained with these settings:", *faults]))
