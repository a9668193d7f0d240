"""How processes share a run, by DDP or FSDP2, and wait for one another; and what they cannot train.

Accelerate provides the engines, configured by `accelerate launch`. Processes meet in the methods of Launch.
"""

import functools
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import numpy as np
import torch
from torch import distributed

from ropecli.data.stream import Batch
from ropecli.errors import RecipeError, reason_of
from ropecli.evaluation.processes import meet
from ropecli.live.rotary import varying_tables
from ropecli.training.recipe_schema import Recipe
from ropecli.training.shared_sequences import part_of, share_attention, sharing_faults

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Engine = Literal["ddp", "fsdp2"]
T = TypeVar("T")
_TIMEOUT = timedelta(minutes=15)
"""The timeout of a collective operation in a step, in which all processes take part together."""
_PATIENCE = timedelta(hours=24)
"""Timeout of a process that waits until others have tokenized, searched, loaded or saved."""


@dataclass(frozen=True)
class Launch:
    """How the processes of a run share the work. A planned one has no accelerator, and only says what is shared.

    world: number of processes. sequence_ranks: number of processes that share each sequence. rank: of this process.
    """

    engine: Engine = "ddp"
    world: int = 1
    sequence_ranks: int = 1
    rank: int = 0
    accelerator: Any = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, accelerator: Any, sequence_ranks: int = 1) -> "Launch":
        from accelerate import DistributedType

        engine: Engine = "fsdp2" if accelerator.distributed_type == DistributedType.FSDP else "ddp"
        return cls(engine, accelerator.num_processes, sequence_ranks, accelerator.process_index, accelerator)

    @property
    def name(self) -> str:
        if self.sequence_ranks > 1:
            return f"{self.engine}-cp"
        return "one" if self.world == 1 else self.engine

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def shards(self) -> bool:
        """Whether processes share weights, gradients and optimizer state."""
        return self.engine == "fsdp2"

    @property
    def data_ranks(self) -> int:
        """Number of ranks that read different sequences."""
        return self.world // self.sequence_ranks

    @property
    def data_rank(self) -> int:
        return self.rank // self.sequence_ranks

    def wait(self) -> None:
        """Wait until all processes have called this. It may take hours, unlike a collective operation."""
        if self.world > 1:
            meet(_waiting_group())

    def from_main(self, answer: Callable[[], T]) -> T:
        """Return the main process's answer on all processes."""
        if self.world == 1:
            return answer()
        values: list[Any] = [answer() if self.is_main else None]
        self.wait()
        distributed.broadcast_object_list(values, group=_waiting_group())
        return values[0]

    def total(self, *numbers: float | torch.Tensor) -> list[float]:
        """The sums of these numbers over all processes, by one reduction, in float64."""
        values = [float(number) for number in numbers]
        if self.world == 1:
            return values
        return self.accelerator.reduce(
            torch.tensor(values, dtype=torch.float64, device=self.accelerator.device)
        ).tolist()

    def prepare(self, loss_of: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        """Call accelerator.prepare with the settings that Accelerate would read from a bare transformers model."""
        accelerator, model = self.accelerator, cast(Any, loss_of.model)
        if self.engine == "fsdp2":
            plugin = accelerator.state.fsdp_plugin
            plugin.cpu_ram_efficient_loading = False  # sharded_weights.py reads the weights after sharding
            if plugin.transformer_cls_names_to_wrap is None:
                plugin.transformer_cls_names_to_wrap = sorted(model._no_split_modules or ())
            if plugin.mixed_precision_policy is not None:
                from torch.distributed.fsdp import MixedPrecisionPolicy

                # Accelerate's default rounds the loss, a sum over many tokens, to bfloat16, and reduces gradients in it
                plugin.mixed_precision_policy = MixedPrecisionPolicy(
                    param_dtype=torch.bfloat16, reduce_dtype=torch.float32
                )
        if self.sequence_ranks > 1:
            share_attention(model, self.sequence_ranks, self.data_ranks, accelerator.device.type)
        return accelerator.prepare(loss_of, optimizer)

    def take(self, batch: Batch[np.ndarray]) -> Batch[torch.Tensor]:
        """This process's part of a batch, on its device, to be passed forward and backward before the next is taken.

        Processes that share a sequence pass the same batch; its length must divide evenly among them.
        """
        device = self.accelerator.device

        def placed(part: Any) -> Any:
            if not isinstance(part, np.ndarray):
                return part
            tensor = torch.tensor(part)
            return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

        if self.sequence_ranks > 1:
            batch = part_of(batch, self.rank % self.sequence_ranks, self.sequence_ranks)
        return Batch(*map(placed, batch))

    def clip(self, parameters: Sequence[torch.nn.Parameter], max_norm: float) -> float | torch.Tensor:
        """Clip the gradient norm over all parameters and processes. Returns the norm before clipping."""
        norm = self.accelerator.clip_grad_norm_(parameters, max_norm)
        full = getattr(norm, "full_tensor", None)  # FSDP2 returns a sharded tensor
        return full() if full else norm

    def least(self, number: int) -> int:
        """The smallest of the processes' numbers."""
        if self.world == 1:
            return number
        return int(self.accelerator.gather(torch.tensor([number], device=self.accelerator.device)).min())


@functools.cache
def _waiting_group() -> Any:
    """The processes as a group of their own, with patience. By gloo: while NCCL waits, it keeps the GPU busy."""
    return distributed.new_group(timeout=_PATIENCE, backend="gloo")


def leave_processes() -> None:
    """End the process group in order: a process that exits earlier can abort the others."""
    if distributed.is_initialized():
        gc.collect()  # what holds on to the group
        distributed.barrier()
        distributed.destroy_process_group()


def start_launch(recipe: Recipe, **options: Any) -> Launch:
    """Start the engine chosen by `accelerate launch` or torchrun, with the recipe's settings.

    options: other arguments of Accelerator. Raises RecipeError for an engine that cannot be used.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs

    AcceleratorState._reset_state()  # otherwise a second run in this process keeps the first run's settings
    if _is_launched_with("DEEPSPEED"):
        raise RecipeError(
            "This launch is configured for DeepSpeed, which is not supported. Use FSDP2: accelerate launch "
            '--config_file "$(ropecli recipe --path 8-gpu-fsdp2)" ...'
        )
    cuda = torch.cuda.is_available()
    options["kwargs_handlers"] = [InitProcessGroupKwargs(timeout=_TIMEOUT)]
    try:
        accelerator = Accelerator(
            mixed_precision="no" if recipe.mixed_precision == "none" else recipe.mixed_precision,
            cpu=not cuda,
            # a plugin, since the launch's environment variables override a number
            gradient_accumulation_plugin=GradientAccumulationPlugin(recipe.gradient_accumulation),
            **options,
        )
    except (ValueError, NotImplementedError, ImportError) as error:
        raise RecipeError(f"Accelerate cannot use this launch configuration: {reason_of(error)}") from error
    launch = Launch.of(accelerator, recipe.context_parallel_size)
    refuse_engine(launch)
    if launch.world > 1:
        _waiting_group()  # all processes make it together
    if cuda and recipe.mixed_precision == "bf16":
        # use TF32 for the head, whose matrix products stay in float32 and are slow otherwise
        torch.set_float32_matmul_precision("high")
    return launch


def _is_launched_with(engine: str) -> bool:
    """Return whether `accelerate launch` enabled this engine, FSDP or DEEPSPEED."""
    return os.environ.get(f"ACCELERATE_USE_{engine}", "false").lower() == "true"


def refuse_engine(launch: Launch) -> None:
    """Raise RecipeError for an engine that Accelerate ignores, or that would train wrongly."""
    if _is_launched_with("FSDP") and launch.engine != "fsdp2" and launch.accelerator.device.type == "cpu":
        # Accelerate silently falls back to data parallelism
        raise RecipeError("FSDP needs a GPU. Without one, use data parallelism (torchrun).")
    plugin = getattr(launch.accelerator.state, "fsdp_plugin", None)
    if plugin and plugin.fsdp_version != 2:
        raise RecipeError(f"fsdp_version is {plugin.fsdp_version}; expected 2. Set it in the Accelerate config.")
    own = launch.accelerator.parallelism_config
    if max(getattr(own, "sp_size", 1), getattr(own, "cp_size", 1)) > 1:
        raise RecipeError("Set context_parallel_size in the recipe, and remove sp_size and cp_size from this launch.")
    if launch.world % launch.sequence_ranks:
        raise RecipeError(
            f"context_parallel_size is {launch.sequence_ranks}; expected a divisor of the {launch.world} processes."
        )
    if launch.sequence_ranks > 1 and find_spec("ringmaster") is None:
        raise RecipeError("context_parallel_size needs axolotl-ringmaster. Run `pip install 'ropecli[ringmaster]'`.")


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
