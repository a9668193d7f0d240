"""Refuses what an engine, a model or a distance method cannot train, before training starts.

Most of it would train something else in silence: sequence parallelism drops every mask but the causal one, and rotary
tables that follow the length would follow each process's own part of it.
"""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from ropecli.config.saved_remapping import SavedRemapping, method_of
from ropecli.errors import RecipeError
from ropecli.live.rotary import follows_length
from ropecli.training.recipe import Recipe

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

_MIXERS = {"linear_attention", "conv", "moe", "hybrid"}
"""Layer types that are not attention with a mask; `_carries_state` knows their models."""


def is_launched_with(engine: str) -> bool:
    """Whether `accelerate launch` has set this engine, FSDP or DEEPSPEED."""
    return os.environ.get(f"ACCELERATE_USE_{engine}", "false").lower() == "true"


def refuse_engine(accelerator: "Accelerator") -> None:
    """Raises RecipeError for an engine that Accelerate ignores, or that would train wrongly."""
    from accelerate import DistributedType

    kind, sizes = accelerator.distributed_type, accelerator.parallelism_config
    sharded = is_launched_with("FSDP") or (sizes and sizes.cp_enabled)
    if sharded and kind != DistributedType.FSDP and accelerator.device.type == "cpu":
        # Accelerate silently falls back to plain data parallelism
        raise RecipeError("FSDP and cp_size need a GPU. Without one, use data parallelism (torchrun) or DeepSpeed.")
    if sizes and sizes.sp_enabled and kind != DistributedType.DEEPSPEED:
        raise RecipeError(f"sp_size is {sizes.sp_size}; set distributed_type to DEEPSPEED, or use cp_size with FSDP.")
    if plugin := getattr(accelerator.state, "fsdp_plugin", None):
        if plugin.fsdp_version != 2:
            raise RecipeError(f"fsdp_version is {plugin.fsdp_version} in the launch's config; set it to 2.")
        if plugin.cpu_ram_efficient_loading:
            # transformers then leaves the weights of all processes but one empty, and the head is tried on real ones
            raise RecipeError(
                "Every process must read the weights itself; set fsdp_cpu_ram_efficient_loading to false."
            )


def refuse_unsuitable(accelerator: "Accelerator", model: "PreTrainedModel", recipe: Recipe, length: int) -> None:
    """Raises RecipeError listing what this launch cannot train. length: tokens per sequence."""
    from accelerate import DistributedType

    kind, sizes = accelerator.distributed_type, accelerator.parallelism_config
    integers = any(not parameter.is_floating_point() for parameter in model.parameters())
    faults: list[str] = []
    if kind == DistributedType.FSDP:
        faults += sharded_weight_faults(recipe, "FSDP2", integers=integers)
    if kind == DistributedType.DEEPSPEED and accelerator.state.deepspeed_plugin.zero_stage == 3:
        faults += sharded_weight_faults(recipe, "ZeRO-3", integers=integers)
    if sizes and (sizes.sp_enabled or sizes.cp_enabled):
        name, size = ("sp_size", sizes.sp_size) if sizes.sp_enabled else ("cp_size", sizes.cp_size)
        context_length = getattr(model.config.get_text_config(), "max_position_embeddings", 1)
        varies = follows_length(model, max(length, context_length))
        faults += shared_sequence_faults(model, recipe, length, name, size, varies=varies)
    if faults:
        raise RecipeError("This cannot be trained as it was launched:\n" + "\n".join(f"  {fault}" for fault in faults))


def sharded_weight_faults(recipe: Recipe, engine: Literal["FSDP2", "ZeRO-3"], *, integers: bool) -> Iterator[str]:
    """Faults of a recipe where each process holds a part of every weight, a sentence each.

    integers: whether some weights are integers, as those in 4 bits are.
    """
    if engine == "FSDP2" and recipe.optimizer == "adamw-8bit":
        # its state and kernels know nothing of sharded tensors: bitsandbytes issue 1633, illegal memory access
        yield "optimizer adamw-8bit does not work on FSDP2's sharded weights. Use adamw, or DeepSpeed."
    if integers:
        # peft's guides to both: bnb_4bit_quant_storage must be a floating dtype
        other = "Set zero_stage to 2." if engine == "ZeRO-3" else "Use DDP (MULTI_GPU), or lora."
        yield f"adapter {recipe.adapter} keeps weights as integers, which {engine} does not split. {other}"


def shared_sequence_faults(
    model: "PreTrainedModel", recipe: Recipe, length: int, name: str, size: int, *, varies: bool
) -> Iterator[str]:
    """Faults of a recipe where processes share a sequence, a sentence each. The model needs no values.

    name: sp_size or cp_size, whose value is size. varies: whether rotary frequencies follow the length.
    """
    ulysses = name == "sp_size"
    other = f"Use {name} 1."
    # context parallelism gives each process an early and a late part, so that all have as much to attend to
    parts = size if ulysses else 2 * size
    if length % parts:
        yield f"length {length} cannot be shared evenly under {name} {size}. Give a multiple of {parts}."
    if any(source.sequences == "packed" for source in recipe.sources):
        # both drop the mask that keeps packed documents apart (ulysses_sp.py; accelerate/big_modeling.py)
        yield f"sequences: packed needs a mask, which {name} {size} drops. Use long or concat."
    if varies:
        # every process would rotate by the largest position of its own part
        yield f"the model's rotary frequencies follow the length; under {name} {size} processes differ in it. {other}"
    for kind in sorted(_partial_attention_layers(model, length if ulysses else None)):
        yield f"the model has layers of type {kind}, which {name} {size} would run with full attention. {other}"
    if _carries_state(model):
        # accelerate/big_modeling.py: every process would begin its part with an empty state
        yield f"the model's layers carry a state along the sequence, which {name} {size} does not hand on. {other}"
    attention = model.config._attn_implementation if recipe.attn == "auto" else recipe.attn
    method = method_of(model.config.get_text_config()._attn_implementation)
    if method is not None:
        # its mask function would take a process's own part of the row for the whole
        yield f"{method} needs whole rows in each process, and {name} {size} splits them. {other}"
    elif ulysses:
        yield from _ulysses_faults(model, size, attention, recipe.positions, other)
    elif attention != "sdpa":
        # torch's context_parallel replaces scaled_dot_product_attention alone
        yield f"the attention {attention!r} does not run under cp_size {size}. Use attn: sdpa."


def _ulysses_faults(model: "PreTrainedModel", size: int, attention: str, positions: str, other: str) -> Iterator[str]:
    if not model._supports_attention_backend:
        # Ulysses replaces transformers' attention functions; other attention would see a process's own part alone
        yield f"{type(model).__name__} does not attend through transformers' attention functions. {other}"
    config: Any = model.config.get_text_config()
    heads, keys = config.num_attention_heads, getattr(config, "num_key_value_heads", None) or size
    if heads % size or (keys % size and size % keys) or getattr(config, "kv_lora_rank", None):
        # asserted in the middle of a step (deepspeed/runtime/sequence_parallel/ulysses_sp.py)
        yield f"{heads} attention heads with {keys} for keys and values cannot be shared by sp_size {size}. {other}"
    if positions != "full" and attention != "sdpa":
        # flash attention takes gaps for borders of documents, and Ulysses drops the mask that says otherwise
        yield f"positions: {positions} under sp_size {size} needs another attention. Use attn: sdpa."


def _partial_attention_layers(model: "PreTrainedModel", length: int | None) -> set[str]:
    """Types of layers that see less than all tokens before them, in sequences of `length` tokens; None for any."""
    config: Any = model.config.get_text_config()
    windows = {
        "sliding_attention": getattr(config, "sliding_window", None),
        "chunked_attention": getattr(config, "attention_chunk_size", None),
    }
    types = getattr(config, "layer_types", None)
    if types is None:  # as in Mistral, the window is then all layers'
        types = ["sliding_attention"] if windows["sliding_attention"] else []
    wide = {kind for kind, window in windows.items() if length is not None and window and window >= length}
    return set(types) - {"full_attention"} - wide - _MIXERS


def _carries_state(model: "PreTrainedModel") -> bool:
    types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    return bool(model._is_stateful or set(types) & (_MIXERS - {"moe"}))


def refuse_method_conflicts(recipe: Recipe, saved: SavedRemapping | None) -> None:
    """Raises RecipeError for what a distance method would silently do wrong, or not do at all.

    Such a method counts the tokens of a row one by one, whatever positions they are given, and needs its own attention.
    """
    if saved is None:
        return
    method, faults = saved.method, []
    if recipe.positions != "full":
        faults.append(f"positions: {recipe.positions} leaves gaps, and {method} ignores positions. Use full.")
    if any(source.sequences == "packed" for source in recipe.sources):
        faults.append(f"sequences: packed puts documents side by side; {method} reads one a row. Use long or concat.")
    if recipe.attn != "auto":
        faults.append(f"attn: {recipe.attn} would replace {method}, which is attention of its own. Use attn: auto.")
    if faults:
        raise RecipeError(f"{method} cannot be trained so:\n" + "\n".join(f"  {fault}" for fault in faults))
