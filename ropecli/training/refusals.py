"""Refuses what an engine, a model or a distance method cannot train, before training starts.

Most of these would silently train something else: sequence parallelism drops every mask except the causal one, and
rotary tables that depend on the length would use each process's part of it.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ropecli.config.layers import CHUNKED, COMPRESSED, FULL, RECURRENT, SLIDING, SPARSE, attention_of
from ropecli.config.saved_remapping import SavedRemapping, method_of
from ropecli.config.settings import read_settings
from ropecli.errors import RecipeError
from ropecli.live.rotary import varying_tables
from ropecli.training.launch import Launch, launched_sizes
from ropecli.training.recipe_schema import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def refuse_unsuitable(launch: Launch, model: "PreTrainedModel", recipe: Recipe, length: int) -> None:
    """Raise RecipeError listing what this launch cannot train. length: tokens per sequence."""
    faults: list[str] = []
    if recipe.loss == "longce" and varying_tables(model, length):
        faults.append(
            "loss: longce compares contexts of different lengths, but the model's rotary frequencies depend on the "
            "length. Use loss: next-token."
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
    if launch.engine == "fsdp2" and recipe.optimizer == "adamw-8bit":
        # its kernels do not support sharded tensors: bitsandbytes issue 1633, illegal memory access
        yield "optimizer: adamw-8bit does not support FSDP2's sharded weights. Use adamw, or DeepSpeed."
    if launch.shards and integers:
        # peft's guides to FSDP and DeepSpeed: bnb_4bit_quant_storage must be a floating dtype
        zero = launch.engine == "zero-3"
        hint = "Set zero_stage to 2." if zero else "Use DDP (MULTI_GPU), or adapter: lora."
        engine = "ZeRO-3" if zero else "FSDP2"
        yield f"adapter: {recipe.adapter} stores weights as integers, which {engine} cannot shard. {hint}"
    if launch.sequence_ranks > 1:
        yield from _shared_sequence_faults(launch, model, recipe, length, varies=varies)


def _shared_sequence_faults(
    launch: Launch, model: "PreTrainedModel", recipe: Recipe, length: int, *, varies: bool
) -> Iterator[str]:
    """Yield why processes cannot share the sequences of a recipe."""
    ulysses, size = launch.sp_size > 1, launch.sequence_ranks
    name = "sp_size" if ulysses else "cp_size"
    hint = f"Set {name} to 1."
    if length % launch.parts:
        yield f"length is {length}; expected a multiple of {launch.parts} for {name} {size}."
    if recipe.packs:
        # both drop the mask that separates packed documents (ulysses_sp.py; accelerate/big_modeling.py)
        yield f"sequences: packed needs a mask, which {name} {size} drops. Use long or concat."
    if recipe.loss == "longce":
        yield f"loss: longce needs whole sequences on each process, but {name} {size} splits them. {hint}"
    if varies:
        # every process would use the largest position of its own part
        yield f"the model's rotary frequencies depend on the length, which {name} {size} splits over processes. {hint}"
    layers = read_settings(model.config.to_dict()).layers
    # context parallelism knows no mask, not even one that hides nothing
    masked = {layer.attention for layer in layers if not (ulysses and layer.window and layer.window >= length)}
    kinds = [kind for kind in (SLIDING, CHUNKED, SPARSE, COMPRESSED) if kind in masked]
    labels = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - {"full_attention"}
    # other names count as full attention, but may do more, as Inkling's hybrid layers do
    for kind in [*kinds, *sorted(label for label in labels if attention_of(label) == FULL)]:
        yield f"the model has layers with {kind} attention, which {name} {size} would run with full attention. {hint}"
    if model._is_stateful or any(layer.attention == RECURRENT for layer in layers):
        # accelerate/big_modeling.py: every process would start its part with an empty state
        yield f"the model's layers carry a state along the sequence, which {name} {size} does not pass on. {hint}"
    attention = model.config._attn_implementation if recipe.attn == "auto" else recipe.attn
    method = method_of(model.config.get_text_config()._attn_implementation)
    if method is not None:
        # its mask function would treat a process's part of the row as the whole row
        yield f"{method} needs whole sequences on each process, but {name} {size} splits them. {hint}"
    elif ulysses:
        yield from _ulysses_faults(model, size, attention, recipe.positions, hint)
    elif attention != "sdpa":
        # torch's context_parallel replaces only scaled_dot_product_attention
        yield f"attn: {attention} does not support cp_size {size}. Use attn: sdpa."
    elif recipe.mixed_precision == "none":
        # without a flash kernel, as for grouped queries in float32, the causal mask would be that of another order
        yield f"mixed_precision: none does not support cp_size {size}. Use mixed_precision: bf16."


def _ulysses_faults(model: "PreTrainedModel", size: int, attention: str, positions: str, hint: str) -> Iterator[str]:
    if not model._supports_attention_backend:
        # Ulysses replaces transformers' attention functions; other attention would see only a process's own part
        yield f"{type(model).__name__} does not use transformers' attention functions, which sp_size needs. {hint}"
    config: Any = model.config.get_text_config()
    heads, keys = config.num_attention_heads, getattr(config, "num_key_value_heads", None) or size
    latent = getattr(config, "kv_lora_rank", None)
    sizes = (
        ranks for ranks in range(size, 1, -1) if size % ranks == heads % ranks == min(keys % ranks, ranks % keys) == 0
    )
    if (most := 1 if latent else next(sizes, 1)) < size:
        # DeepSpeed asserts this only in the middle of a step (deepspeed/runtime/sequence_parallel/ulysses_sp.py)
        hint = f"Set sp_size to {most}."
        yield f"{heads} attention heads and {keys} key-value heads cannot be split by sp_size {size}. {hint}"
    if attention in ("eager", "flex_attention"):
        # refused by Accelerate too (utils/dataclasses.py, DeepSpeedSequenceParallelConfig), but after the data is read
        yield f"attn: {attention} does not support sp_size {size}. Use attn: sdpa or flash_attention_2."
    elif positions != "full" and attention != "sdpa":
        # flash attention treats gaps as document boundaries, and Ulysses drops the mask that would prevent it
        yield f"positions: {positions} under sp_size {size} needs attn: sdpa."


def why_unpackable(recipe: Recipe, config: dict[str, Any], saved: SavedRemapping | None) -> str:
    """Why this recipe, model or launch cannot pack conversations side by side; empty if nothing is known against it."""
    if recipe.positions != "full":
        return f"positions: {recipe.positions}"
    if recipe.loss == "longce":
        return "loss: longce"
    if saved is not None:
        return f"{saved.method} does not support packed documents"
    if max(launched_sizes()) > 1:
        return "processes share each sequence"
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
        faults.append(f"positions: {recipe.positions} has no effect, since {method} ignores position_ids. Use full.")
    if recipe.packs:
        faults.append(
            f"sequences: packed needs separate documents in a row, which {method} does not support. Use long or concat."
        )
    if recipe.attn != "auto":
        faults.append(f"attn: {recipe.attn} would replace {method}'s own attention. Use attn: auto.")
    if faults:
        raise RecipeError("\n  ".join([f"{method} cannot be trained with these settings:", *faults]))
