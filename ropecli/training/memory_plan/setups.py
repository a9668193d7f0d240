"""Finds training setups that fit in GPU and main memory with the fewest changes, and the command that runs one."""

import json
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ropecli.errors import CheckpointError
from ropecli.live.devices import total_memory
from ropecli.messages import progress_bar, size
from ropecli.ranks import read_ranks
from ropecli.training.launch import Launch, launch_faults
from ropecli.training.memory_plan.estimate import ONE, MemoryEstimate, MemoryEstimator
from ropecli.training.memory_plan.hardware import TRAINING_ENGINES
from ropecli.training.recipe_schema import Recipe
from ropecli.training.sharded_weights import is_converted

CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"gradient_checkpointing": True},
    {"optimizer": "adamw-8bit"},
    {"gradient_checkpointing": True, "offload_activations": True},
    {"gradient_checkpointing": True, "optimizer": "adamw-8bit"},
    {"gradient_checkpointing": True, "offload_activations": True, "optimizer": "adamw-8bit"},
)
"""Changes of the recipe, tried in this order. The last takes the least memory."""
PLAIN_CHANGES = tuple(changes for changes in CHANGES if "optimizer" not in changes)
"""The changes that need no other library."""
_GPUS_PER_HOST = 8


@dataclass(frozen=True)
class Setup:
    """One way to train: a launch, a recipe, and the memory that they take.

    recipe: with gradient_checkpointing: auto resolved. changes: its keys that differ from the user's recipe, without
    that one. host: bytes of main memory that all processes of a machine need for weights while they load, and for
    offloaded activations. refused: why `finetune` would refuse it.
    """

    launch: Launch
    recipe: Recipe
    changes: dict[str, Any]
    estimate: MemoryEstimate
    host: int
    fits: bool
    refused: str = ""

    @property
    def settings(self) -> list[str]:
        """Whether it recomputes layers, and its other changes, in a word or two each."""
        words = {"offload_activations": "offload", "optimizer": "8-bit AdamW"}
        changed = [words[key] for key in self.changes if key in words]
        return ["checkpointing", *changed] if self.recipe.gradient_checkpointing is True else changed


def find_setups(
    estimator: MemoryEstimator, recipe: Recipe, length: int, gpus: int, memory: int, host: int = sys.maxsize
) -> list[Setup]:
    """One setup per engine: the first change that fits, or else the one that needs the least memory.

    If none fits with the recipe's own adapter, those of smaller adapters follow. memory: bytes of one GPU. host: bytes
    of main memory of one machine. Raises CheckpointError.
    """
    setups: list[Setup] = []
    smaller = {"none": ("lora", "qlora"), "qlora": ()}.get(recipe.adapter, ("qlora",))
    with progress_bar("estimating", None) as step:
        for adapter in (recipe.adapter, *smaller):
            changes = {} if adapter == recipe.adapter else {"adapter": adapter}
            for launch in _launches(estimator, recipe, gpus):
                step(text=f"adapter {adapter}, {TRAINING_ENGINES[launch.name]}")
                adapted = recipe.model_copy(update=changes)
                setup = find_setup(estimator, adapted, length, launch, memory, host)
                setups.append(replace(setup, changes=changes | setup.changes))
            if any(setup.fits for setup in setups):
                break
    return setups


def _launches(estimator: MemoryEstimator, recipe: Recipe, gpus: int) -> Iterator[Launch]:
    if gpus == 1:
        yield ONE
        return
    yield from (Launch("ddp", gpus), Launch("fsdp2", gpus))
    shared = recipe.context_parallel_size
    if shared == 1 or gpus % shared:
        shared = math.gcd(gpus, estimator.model.config.get_text_config().num_attention_heads)
    # if no size divides the heads, the row shows why finetune refuses it
    yield Launch("fsdp2", gpus, shared if shared > 1 else gpus)


def best_setup(setups: list[Setup]) -> Setup | None:
    """The setup with the fewest changes among those that fit; the first of several."""
    return min((setup for setup in setups if setup.fits), key=lambda setup: len(setup.changes), default=None)


def find_setup(
    estimator: MemoryEstimator,
    recipe: Recipe,
    length: int,
    launch: Launch,
    memory: int,
    host: int = sys.maxsize,
    *,
    changes: Sequence[dict[str, Any]] = CHANGES,
) -> Setup:
    """The setup with the first of the changes that fits, or else with the last. memory, host: bytes."""
    model = estimator.model
    if refused := next(launch_faults(launch, model, recipe, length), ""):
        return Setup(launch, recipe, {}, MemoryEstimate(), 0, False, refused)

    def setup_with(keys: dict[str, Any]) -> Setup:
        changed = recipe.model_copy(update=keys)
        estimate = estimator.estimate(changed, length, launch)
        needed = host_memory(estimator, estimate, changed, launch)
        listed = {key: value for key, value in keys.items() if getattr(recipe, key) not in (value, "auto")}
        return Setup(launch, changed, listed, estimate, needed, estimate.total <= memory and needed <= host)

    changes = [
        keys for keys in changes if not any(launch_faults(launch, model, recipe.model_copy(update=keys), length))
    ]
    last = setup_with(changes[-1])
    if last.estimate.total > memory:  # then so do all others
        return last
    recipe = estimator.resolve_checkpointing(recipe, length, launch, memory)
    return next((setup for keys in changes if (setup := setup_with(keys)).fits), last)


def host_memory(estimator: MemoryEstimator, estimate: MemoryEstimate, recipe: Recipe, launch: Launch) -> int:
    """Bytes over the processes of one machine, of which it has at most eight.

    For weights while they load, or for activations in training. Python and its libraries are not counted, nor what the
    system caches of the weight files. estimate: of one GPU.
    """
    processes = min(launch.world, _GPUS_PER_HOST)
    total = estimator.shape.total
    largest = max(parameter.numel() for parameter in estimator.model.parameters())
    if launch.shards and not is_converted(estimator.model):
        loading = 4 * largest * processes // launch.world  # tensor by tensor, each process its own part
    elif recipe.adapter == "qlora":
        loading = 4 * largest * processes  # tensor by tensor
    elif launch.shards:
        loading = 4 * total  # the main process converts the tensors and sends them to the others
    else:
        loading = (4 if recipe.adapter == "none" else 2) * total * processes
    return max(loading, estimate.host * processes)


def launch_command(setup: Setup, checkpoint: str, length: int, recipe: str | Path | None, given: dict[str, Any]) -> str:
    """The shell command that starts the training. recipe: name or file. given: recipe keys set by the user."""
    words = [checkpoint]
    if recipe:
        words += ["--recipe", str(recipe)]
    elif "data" not in given:
        words += ["--data", "DATA"]
    if not recipe or "length" in given:  # otherwise the recipe's length, which may differ by stage
        words += ["--length", str(length)]
    launch, ranks = setup.launch, setup.launch.sequence_ranks
    shared = {} if ranks == setup.recipe.context_parallel_size else {"context_parallel_size": ranks}
    for key, value in {**given, **setup.changes, **shared}.items():
        if key != "length":
            words += ["--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
    config = f'--config_file "$(ropecli recipe --path {"8-gpu-fsdp2" if launch.shards else "1-gpu"})"'
    options = ["--multi_gpu --num_machines 1" if launch.name == "ddp" else config, f"--num_processes {launch.world}"]
    options.append(f"--mixed_precision {'no' if setup.recipe.mixed_precision == 'none' else 'bf16'}")
    # the large tensors of long sequences find no room between others: TRL's guide long_context_training
    allocator = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True " if ranks > 1 else ""
    finetune = shlex.join(["finetune", *words, "--output", "OUTPUT"])
    return f"{allocator}accelerate launch {' '.join(options)} -m ropecli {finetune}"


def memory_of(device: Any) -> int:
    """Bytes of a process on the device: processes share the machine's main memory."""
    return total_memory(device) // (read_ranks().local_count if device.type == "cpu" else 1)


def agree_on_checkpointing(
    launch: Launch, config: Any, recipe: Recipe, length: int, say: Callable[[str], None]
) -> Recipe:
    """Replace gradient_checkpointing: auto, as the main process estimates it. All processes call it together.

    config: by stock transformers. length: tokens of the whole sequence. say: called if layers are recomputed.
    """
    if recipe.gradient_checkpointing != "auto":
        return recipe
    device = launch.accelerator.device
    memory = launch.least(memory_of(device))

    def recompute() -> bool:
        try:
            estimator = MemoryEstimator(config, gpu=device.type == "cuda")
        except CheckpointError as error:
            say(f"gradient_checkpointing: auto is on. {error}")
            return True
        resolved = estimator.resolve_checkpointing(recipe, length, launch, memory)
        if resolved.gradient_checkpointing:
            say(f"gradient_checkpointing: auto is on. Without it, a step may not fit in {size(memory)}.")
        return bool(resolved.gradient_checkpointing)

    return recipe.model_copy(update={"gradient_checkpointing": launch.from_main(recompute)})
