"""Finds training setups that fit in GPU and main memory with the fewest changes, and the command that runs one."""

import copy
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ByteSize, TypeAdapter

from ropecli.errors import CheckpointError, RecipeError, shown
from ropecli.launch import read_launch
from ropecli.live.devices import total_memory
from ropecli.messages import size
from ropecli.training.distributed import sequence_ranks
from ropecli.training.memory_plan.estimate import SEQUENCE_SHARED, SHARDED, Engine, MemoryEstimate, MemoryEstimator
from ropecli.training.recipe_schema import Recipe
from ropecli.training.refusals import context_ranks, sharded_weight_faults, shards_weights, shared_sequence_faults
from ropecli.training.sharded_weights import is_converted
from ropecli.training.tiled_mlp import untileable

if TYPE_CHECKING:
    from accelerate import Accelerator

_CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"gradient_checkpointing": True},
    {"optimizer": "adamw-8bit"},
    {"gradient_checkpointing": True, "offload_activations": True},
    {"gradient_checkpointing": True, "optimizer": "adamw-8bit"},
    {"gradient_checkpointing": True, "tiled_mlp": True},
    {"gradient_checkpointing": True, "offload_activations": True, "optimizer": "adamw-8bit"},
    {"gradient_checkpointing": True, "offload_activations": True, "tiled_mlp": True},
    {"gradient_checkpointing": True, "offload_activations": True, "optimizer": "adamw-8bit", "tiled_mlp": True},
)
"""Tried in this order: the first that fits changes least."""
GPUS_PER_HOST = 8
_FILE = 5 * 10**9
"""Bytes of a weight file, as checkpoints on the Hub are usually cut."""
_CONFIGS: dict[Engine, str] = {
    "one": "1-gpu",
    "fsdp2": "8-gpu-fsdp2",
    "fsdp2-cp": "8-gpu-fsdp2-cp",
    "ulysses": "8-gpu-ulysses",
}
_SIZES: dict[Engine, str] = {"fsdp2-cp": "cp_size", "ulysses": "sp_size"}
"""Accelerate's name for the number of processes that share a sequence."""


@dataclass(frozen=True)
class HostMemory:
    """Bytes over all processes of one machine.

    Python and its libraries are not counted, nor is what the system caches of the weight files.
    loading: the weights that processes read. training: activations that are kept in main memory. saving: the result.
    """

    loading: int = 0
    training: int = 0
    saving: int = 0

    @property
    def most(self) -> int:
        return max(asdict(self).values())


@dataclass(frozen=True)
class Setup:
    """One way to train: engine, changes of the recipe, and memory of a GPU and of its host.

    recipe: changed, with gradient_checkpointing: auto resolved; that is not a change. refused: why `finetune` would
    refuse it.
    """

    engine: Engine
    world: int
    changes: dict[str, Any]
    recipe: Recipe
    estimate: MemoryEstimate
    host: HostMemory
    fits: bool
    refused: str = ""

    @property
    def data_ranks(self) -> int:
        return 1 if self.engine in SEQUENCE_SHARED else self.world


def find_setups(
    estimator: MemoryEstimator, recipe: Recipe, length: int, gpus: int, memory: int, host: int = sys.maxsize
) -> list[Setup]:
    """One setup per adapter and engine: the first change that fits, or else the one that needs the least memory.

    memory: bytes of one GPU. host: bytes of main memory of one machine. Raises CheckpointError.
    """
    engines: tuple[Engine, ...] = ("one",) if gpus == 1 else ("ddp", "fsdp2", "ulysses", "fsdp2-cp")
    # the recipe's own adapter, then those that need less memory
    smaller = {"none": ("lora", "qlora"), "qlora": ()}.get(recipe.adapter, ("qlora",))
    return [
        _smallest_change(estimator, recipe, adapter, engine, length, gpus, memory=memory, host=host)
        for adapter in (recipe.adapter, *smaller)
        for engine in engines
    ]


def best_setup(setups: list[Setup]) -> Setup | None:
    """The setup with the fewest changes among those that fit; the first of several."""
    return min((setup for setup in setups if setup.fits), key=lambda setup: len(setup.changes), default=None)


def alternatives_to(best: Setup, setups: list[Setup]) -> list[Setup]:
    """The other setups that fit with the same changes, and read as many sequences per step."""
    return [
        setup
        for setup in setups
        if setup.fits and setup is not best and (setup.changes, setup.data_ranks) == (best.changes, best.data_ranks)
    ]


def _smallest_change(
    estimator: MemoryEstimator, recipe: Recipe, adapter: str, engine: Engine, length: int, gpus: int, **limits: int
) -> Setup:
    """limits: memory and host, bytes."""
    with_adapter = recipe.model_copy(update={"adapter": adapter})
    if refused := next(refusals(estimator, with_adapter, length, engine, gpus), ""):
        return Setup(engine, gpus, {}, with_adapter, MemoryEstimate(), HostMemory(), False, refused)

    def setup(base: Recipe, change: dict[str, Any]) -> Setup:
        changes = {} if adapter == recipe.adapter else {"adapter": adapter}
        changes |= {key: value for key, value in change.items() if getattr(base, key) != value}
        changed = base.model_copy(update=change)
        estimate = estimator.estimate(changed, length, engine, gpus)
        needed = estimate_host(estimator, estimate, changed, engine, gpus)
        fits = estimate.total <= limits["memory"] and needed.most <= limits["host"]
        return Setup(engine, gpus, changes, changed, estimate, needed, fits)

    possible = [
        change
        for change in _CHANGES
        if not any(refusals(estimator, with_adapter.model_copy(update=change), length, engine, gpus))
    ]
    recomputed = recipe.gradient_checkpointing == "auto"
    base = with_adapter.model_copy(update={"gradient_checkpointing": True}) if recomputed else with_adapter
    if setup(base, {}).estimate.total <= limits["memory"]:
        base = estimator.resolve_checkpointing(with_adapter, length, engine, gpus, limits["memory"])
    else:
        # with the most changes, and without tiles, whose copies may take more than they save
        most = [setup(base, change) for change in possible if {**change, "tiled_mlp": True} == possible[-1]]
        least = min([*most, setup(base, possible[-1])], key=lambda setup: setup.estimate.total)
        if least.estimate.total > limits["memory"]:  # then so does every other
            return least
    setups = []
    for change in possible:
        setups.append(setup(base, change))
        if setups[-1].fits:
            return setups[-1]
    return min(setups, key=lambda setup: setup.estimate.total)


def estimate_host(
    estimator: MemoryEstimator, estimate: MemoryEstimate, recipe: Recipe, engine: Engine, world: int
) -> HostMemory:
    """estimate: of one GPU. world: number of GPUs, of which a machine has at most eight."""
    processes = min(world, GPUS_PER_HOST)
    sharded = engine in SHARDED and not is_converted(estimator.model)
    total, item, trained = estimator.shape.total, estimator.item, estimate.trained
    largest = max(parameter.numel() for parameter in estimator.model.parameters())
    if sharded and engine != "ulysses":
        loading = 4 * largest * processes // world  # tensor by tensor, each process its own part
    elif sharded or recipe.adapter == "qlora":
        loading = 4 * largest * processes  # tensor by tensor
    elif engine in SHARDED:
        loading = 4 * total  # the main process converts the tensors and sends them to the others
    else:
        loading = (4 if recipe.adapter == "none" else 2) * total * processes
    # on the main process: the trained weights in float32, then cast to the source's dtype
    whole = 4 * total + (item * total if item < 4 else 0)
    if recipe.adapter == "none":
        saving = min(item * total, _FILE) if sharded else whole
    else:
        saving = 8 * trained + (0 if sharded else 2 * total) + (0 if recipe.save == "adapter" else whole)
    return HostMemory(loading, estimate.host * processes, saving)


def refusals(estimator: MemoryEstimator, recipe: Recipe, length: int, engine: Engine, gpus: int) -> Iterator[str]:
    """Yield the messages with which `finetune` would refuse a setup."""
    integers = recipe.adapter == "qlora"
    if recipe.tiled_mlp and not estimator.fake_steps.tileable:
        yield untileable(estimator.model)
    if engine in SHARDED:
        yield from sharded_weight_faults(recipe, "ZeRO-3" if engine == "ulysses" else "FSDP2", integers=integers)
    if size := _SIZES.get(engine):
        yield from shared_sequence_faults(estimator.model, recipe, length, size, gpus, varies=estimator.varies)


def launch_command(setup: Setup, checkpoint: str, length: int, recipe: str | Path | None, given: dict[str, Any]) -> str:
    """The shell command that starts the training. recipe: name or file. given: recipe keys set by the user."""
    words = [checkpoint]
    if recipe:
        words += ["--recipe", str(recipe)]
    elif "data" not in given:
        words += ["--data", "DATA"]
    if not recipe or "length" in given:  # otherwise the recipe's length, which may differ by stage
        words += ["--length", str(length)]
    for key, value in {**given, **setup.changes}.items():
        if key != "length":
            words += ["--set", f"{key}={value}"]
    config = f'--config_file "$(ropecli recipe --path {_CONFIGS.get(setup.engine)})"'
    launch = ["--multi_gpu --num_machines 1" if setup.engine == "ddp" else config, f"--num_processes {setup.world}"]
    if size := _SIZES.get(setup.engine):
        launch.append(f"--parallelism_config_{size} {setup.world}")
    launch.append(f"--mixed_precision {'no' if setup.recipe.mixed_precision == 'none' else 'bf16'}")
    # the large tensors of long sequences find no room between others: TRL's guide long_context_training
    allocator = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True " if setup.engine in SEQUENCE_SHARED else ""
    finetune = shlex.join(["finetune", *words, "--output", "OUTPUT"])
    return f"{allocator}accelerate launch {' '.join(launch)} -m ropecli {finetune}"


def resolve_checkpointing(
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
        memory //= read_launch().local_count  # processes share the machine's memory
    memory = int(accelerator.gather(torch.tensor([memory], device=accelerator.device)).min())
    # ZeRO-3 shards like FSDP2; ZeRO-1 and 2 count as DDP, which needs more
    engine: Engine = "one" if accelerator.num_processes == 1 else "ddp"
    part, processes = -(-length // sequence_ranks(accelerator)), accelerator.num_processes
    if shards_weights(accelerator):
        engine = "fsdp2"
        if context_ranks(accelerator) > 1:
            engine, part = "fsdp2-cp", part * processes  # as if all shared one sequence: then attention gathers most
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the estimate counts qlora itself
    gpu = accelerator.device.type == "cuda"
    try:
        resolved = MemoryEstimator(config).resolve_checkpointing(recipe, part, engine, processes, memory, gpu)
    except CheckpointError as error:
        say(f"gradient_checkpointing: auto is on. {error}")
        return recipe.model_copy(update={"gradient_checkpointing": True})
    if resolved.gradient_checkpointing:
        say(f"gradient_checkpointing: auto is on. Without it, a step may not fit in {size(memory)}.")
    return resolved


def parse_size(text: str, name: str) -> int:
    """Parse a size in bytes: 80GB is 80 × 10⁹ bytes, 80GiB is 80 × 2³⁰. name: for the message.

    Raises RecipeError.
    """
    try:
        if text.strip().isdecimal():
            raise ValueError("no unit")
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValueError as error:
        raise RecipeError(
            f"{name} is {shown(text)}; expected a number with a unit, such as 80GB (10⁹ bytes) or 80GiB."
        ) from error
