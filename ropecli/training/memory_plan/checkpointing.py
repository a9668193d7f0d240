"""Resolves gradient_checkpointing: auto for a launched run, by the plan's estimate and the memory of the devices."""

import copy
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ropecli.errors import CheckpointError
from ropecli.live.devices import total_memory
from ropecli.training.distributed import sequence_ranks, shards_weights
from ropecli.training.memory_plan.estimate import Engine, MemoryEstimator
from ropecli.training.memory_plan.setups import format_gb
from ropecli.training.recipe import Recipe

if TYPE_CHECKING:
    from accelerate import Accelerator


def resolve_for_run(
    accelerator: "Accelerator", config: Any, recipe: Recipe, length: int, recorded: Any, say: Callable[[str], None]
) -> Recipe:
    """Replace gradient_checkpointing: auto, the same on all processes, which call this together.

    config: the model's. length: tokens of the whole sequence. recorded: the value of the run that is resumed, if any,
    which is kept. say: called with the reason if layers are recomputed.
    """
    if recipe.gradient_checkpointing != "auto":
        return recipe
    if isinstance(recorded, bool):
        return recipe.model_copy(update={"gradient_checkpointing": recorded})
    memory = total_memory(accelerator.device)
    if accelerator.device.type == "cpu":
        memory //= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # processes share the machine's memory
    memory = int(accelerator.gather(torch.tensor([memory], device=accelerator.device)).min())
    # ZeRO-3 shards like FSDP2; ZeRO-1 and 2 count as DDP, which needs more
    engine: Engine = "one" if accelerator.num_processes == 1 else "ddp"
    if shards_weights(accelerator):
        engine = "fsdp2"
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the estimate counts qlora itself
    part, gpu = -(-length // sequence_ranks(accelerator)), accelerator.device.type == "cuda"
    try:
        resolved = MemoryEstimator(config).resolve_checkpointing(
            recipe, part, engine, accelerator.num_processes, memory, gpu
        )
    except CheckpointError as error:
        say(f"gradient_checkpointing: auto is on. {error}")
        return recipe.model_copy(update={"gradient_checkpointing": True})
    if resolved.gradient_checkpointing:
        say(f"gradient_checkpointing: auto is on. Without it, a step may not fit in {format_gb(memory)}.")
    return resolved
