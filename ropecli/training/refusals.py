"""Refuses what a model or an engine cannot train, before training starts."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ropecli.errors import RecipeError
from ropecli.live.rotary import varying_tables
from ropecli.training.launch import Launch
from ropecli.training.recipe_schema import Recipe
from ropecli.training.shared_sequences import sharing_faults

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
    if recipe.packs and recipe.batch_size > 1 and "flash" in model.config.get_text_config()._attn_implementation:
        # transformers' _is_packed_sequence
        faults.append(
            "flash attention separates packed documents in a batch of one sequence only. Use --batch-size 1, and "
            "--gradient-accumulation for the rest."
        )
    faults += launch_faults(launch, model, recipe, length)
    if faults:
        raise RecipeError(
            "\n  ".join(["This recipe cannot be trained with this model and launch configuration:", *faults])
        )


def launch_faults(launch: Launch, model: "PreTrainedModel", recipe: Recipe, length: int) -> Iterator[str]:
    """Yield why a recipe cannot train with sharded weights or shared sequences, one sentence each.

    model: may be on the meta device.
    """
    if launch.shards and recipe.optimizer == "adamw-8bit":
        # its kernels do not support sharded tensors: bitsandbytes issue 1633, illegal memory access
        yield "optimizer: adamw-8bit does not support FSDP2's sharded weights. Use adamw."
    quantized = recipe.adapter == "qlora" or any(not weight.is_floating_point() for weight in model.parameters())
    if launch.shards and quantized:
        # peft's guide to FSDP: bnb_4bit_quant_storage must be a floating dtype
        hint = "Use DDP (MULTI_GPU), or --adapter lora."
        yield f"--adapter {recipe.adapter} stores weights as integers, which FSDP2 cannot shard. {hint}"
    if launch.sequence_ranks > 1:
        yield from sharing_faults(launch.sequence_ranks, model, recipe, length)
