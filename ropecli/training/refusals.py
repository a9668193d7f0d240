"""Refuses what an engine, a model or a relative-position method cannot train, before training starts.

Without these refusals most would train something else in silence: sequence parallelism drops every mask but the causal
one, and tables that follow the length would follow each process's own part of it.
"""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.patch_plan import PatchPlan
from ropecli.config.saved_remapping import SavedRemapping, method_of, read_saved_remapping
from ropecli.errors import RecipeError
from ropecli.live.rotary import follows_length
from ropecli.training.recipe import Recipe

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

_MIXERS = {"linear_attention", "conv", "moe", "hybrid"}
"""Layer types that are not attention with a mask; `_carries_state` knows their models."""


def refuse_without_gpu() -> None:
    """Raises RecipeError for what Accelerate would silently run as plain data parallelism."""
    asked = "FSDP" if asked_for("FSDP") else None
    if asked_for("PARALLELISM_CONFIG") and (size := os.environ.get("PARALLELISM_CONFIG_CP_SIZE", "1")) != "1":
        asked = f"context parallelism (cp_size {size})"  # torch has no such kernel for a CPU
    if asked:
        raise RecipeError(
            f"{asked} is asked for, and there is no GPU. Without one, use plain data parallelism (torchrun), or "
            "DeepSpeed."
        )


def asked_for(engine: str) -> bool:
    """Whether the launch has set this engine."""
    return os.environ.get(f"ACCELERATE_USE_{engine}", "false").lower() == "true"


def refuse_engine(accelerator: "Accelerator") -> None:
    """Raises RecipeError for what was set up and would train wrongly, or fail with an error that says little."""
    from accelerate import DistributedType

    if plugin := getattr(accelerator.state, "fsdp_plugin", None):
        if plugin.fsdp_version != 2:
            raise RecipeError(f"FSDP version {plugin.fsdp_version} is asked for; set fsdp_version to 2 in the config.")
        if plugin.cpu_ram_efficient_loading:
            # transformers then leaves the weights of all processes but one empty, and the head is tried on real ones
            raise RecipeError(
                "Every process must read the weights itself; set fsdp_cpu_ram_efficient_loading to false."
            )
    sizes = accelerator.parallelism_config
    if sizes and sizes.sp_enabled and accelerator.distributed_type != DistributedType.DEEPSPEED:
        raise RecipeError(f"sp_size is {sizes.sp_size}; set distributed_type to DEEPSPEED, or take cp_size with FSDP.")
    # Accelerate leaves this unchecked under DeepSpeed, whose batch sizes would then not add up
    if sizes and sizes.total_size != accelerator.num_processes:
        raise RecipeError(
            f"The sizes in parallelism_config make {sizes.total_size} processes, and there are "
            f"{accelerator.num_processes}; set dp_replicate_size so that all sizes multiply to that."
        )


def refuse_unsuitable(accelerator: "Accelerator", model: "PreTrainedModel", recipe: Recipe, length: int) -> None:
    """length: of the sequences, tokens. Raises RecipeError with all faults."""
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
        varies = follows_length(model, max(length, _context_length(model)))
        faults += shared_sequence_faults(model, recipe, length, name, size, varies=varies)
    if faults:
        raise RecipeError("This cannot be trained as it was launched:\n" + "\n".join(f"  {fault}" for fault in faults))


def sharded_weight_faults(recipe: Recipe, engine: Literal["FSDP2", "ZeRO-3"], *, integers: bool) -> Iterator[str]:
    """What cannot be trained where each process holds a part of every weight, a sentence each.

    integers: whether some weights are, as those in 4 bits.
    """
    if engine == "FSDP2" and recipe.optimizer == "adamw-8bit":
        # its state and kernels know nothing of sharded tensors: bitsandbytes issue 1633, illegal memory access
        yield "optimizer adamw-8bit does not work on FSDP2's sharded weights. Take adamw, or DeepSpeed."
    if integers:
        # peft's guides to both: bnb_4bit_quant_storage must be a floating dtype
        other = "Set zero_stage to 2." if engine == "ZeRO-3" else "Take DDP (MULTI_GPU), or lora."
        yield f"adapter {recipe.adapter} keeps weights as integers, which {engine} does not split. {other}"


def shared_sequence_faults(
    model: "PreTrainedModel", recipe: Recipe, length: int, name: str, size: int, *, varies: bool
) -> Iterator[str]:
    """What cannot be trained where processes share a sequence, a sentence each. The model needs no values.

    name: sp_size or cp_size, whose value is size. varies: whether rotary frequencies follow the length.
    """
    ulysses = name == "sp_size"
    other = f"Take {name} 1."
    # context parallelism gives each process an early and a late part, so that all have as much to attend to
    parts = size if ulysses else 2 * size
    if length % parts:
        yield f"length {length} cannot be shared evenly under {name} {size}. Give a multiple of {parts}."
    if any(source.sequences == "packed" for source in recipe.sources):
        # both drop the mask that keeps packed documents apart (ulysses_sp.py; accelerate/big_modeling.py)
        yield f"sequences: packed needs a mask, which {name} {size} drops. Take long or concat."
    if varies:
        # every process would turn by the largest position of its own part
        yield f"the model's rotary frequencies follow the length; under {name} {size} processes differ in it. {other}"
    for kind in sorted(_partial_attention_layers(model, length if ulysses else None)):
        yield f"the model has layers of type {kind}, which {name} {size} would run with full attention. {other}"
    if _carries_state(model):
        # accelerate/big_modeling.py: every process would begin its part with an empty state
        yield f"the model's layers carry a state along the sequence, which {name} {size} does not hand on. {other}"
    attention = model.config._attn_implementation if recipe.attn == "auto" else recipe.attn
    method = method_of(model.config.get_text_config()._attn_implementation)
    if method is not None:
        # its mask function sees a process's own part of the row, and takes it for the whole
        yield f"{method} needs whole rows in each process, and {name} {size} splits them. {other}"
    elif ulysses:
        yield from _ulysses_faults(model, size, attention, recipe.positions, other)
    elif attention != "sdpa":
        # torch's context_parallel stands in for scaled_dot_product_attention alone
        yield f"the attention {attention!r} does not run under cp_size {size}. Take attn: sdpa."


def _ulysses_faults(model: "PreTrainedModel", size: int, attention: str, positions: str, other: str) -> Iterator[str]:
    if not model._supports_attention_backend:
        # the one place where Ulysses steps in; other attention would see a process's own part alone
        yield f"{type(model).__name__} does not attend through transformers' attention functions. {other}"
    config: Any = model.config.get_text_config()
    heads, keys = config.num_attention_heads, getattr(config, "num_key_value_heads", None) or size
    if heads % size or (keys % size and size % keys) or getattr(config, "kv_lora_rank", None):
        # asserted in the middle of a step (deepspeed/runtime/sequence_parallel/ulysses_sp.py)
        yield f"{heads} attention heads with {keys} for keys and values cannot be shared by sp_size {size}. {other}"
    if positions != "full" and attention != "sdpa":
        # flash attention takes gaps for borders of documents, and Ulysses drops the mask that says otherwise
        yield f"positions: {positions} under sp_size {size} needs another attention. Take attn: sdpa."


def _partial_attention_layers(model: "PreTrainedModel", length: int | None) -> set[str]:
    """Types of layers that see less than all before them, in sequences of `length` tokens; None for of any length."""
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


def _context_length(model: "PreTrainedModel") -> int:
    return getattr(model.config.get_text_config(), "max_position_embeddings", 1)


def saved_method(checkpoint: Checkpoint, plan: PatchPlan | None = None) -> SavedRemapping | None:
    """The relative-position method that a run trains with, as config.json holds it; None without one.

    plan: the patch that the run begins with, not on disk yet. Raises CheckpointError for a config.json that holds half
    of a method.
    """
    return read_saved_remapping(plan.config if plan else checkpoint.config)


def refuse_method_conflicts(recipe: Recipe, saved: SavedRemapping | None) -> None:
    """Raises RecipeError with all that the relative-position method would silently do wrong, or not do at all.

    Such a method counts the tokens of a row one by one, whatever positions they are given, and needs its own attention.
    """
    if saved is None:
        return
    method, faults = saved.method, []
    if recipe.positions != "full":
        faults.append(
            f"positions: {recipe.positions} leaves gaps, and {method} goes by the order of the tokens: near keys would "
            "be as far as the gaps say, and far ones not. Take positions: full."
        )
    if any(source.sequences == "packed" for source in recipe.sources):
        faults.append(f"sequences: packed lays documents side by side; {method} reads one a row. Take long or concat.")
    if recipe.attn != "auto":
        faults.append(
            f"attn: {recipe.attn} would do away with {method}, which is attention of its own. Take attn: auto."
        )
    if faults:
        raise RecipeError(f"{method} cannot be trained so:\n" + "\n".join(f"  {fault}" for fault in faults))
