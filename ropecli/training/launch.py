"""How processes share a run, by DDP or FSDP2, and a long sequence, by its parts.

Accelerate provides both, configured by `accelerate launch`. Processes meet in the methods of Launch.
axolotl-ringmaster shares sequences: around attention, processes exchange parts of the sequence for heads (Ulysses,
Jacobs et al. 2023, arXiv:2309.14509).
"""

import contextlib
import functools
import gc
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from ropecli.config.layers import SLIDING
from ropecli.config.settings import read_settings
from ropecli.data.stream import Batch
from ropecli.errors import RecipeError, reason_of
from ropecli.evaluation.processes import meet
from ropecli.training.recipe_schema import Recipe

Engine = Literal["ddp", "fsdp2"]
T = TypeVar("T")
_TIMEOUT = timedelta(minutes=15)
"""The timeout of a collective operation in a step, in which all processes take part together."""
_PATIENCE = timedelta(hours=24)
"""Timeout of a process that waits until others have tokenized, searched, loaded or saved."""
_WINDOW = "sliding_window"
_SHARED = "ropecli_shared"
"""Name in transformers of attention that processes share."""


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

    @contextlib.contextmanager
    def local_main_first(self) -> Iterator[None]:
        """Run the block on the first process of each host, then on its others."""
        first = self.rank - self.accelerator.local_process_index
        if self.rank != first:
            self.wait()
        yield
        if self.rank == first:
            self.wait()

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
            self._share_attention(model)
        return accelerator.prepare(loss_of, optimizer)

    def _share_attention(self, model: Any) -> None:
        """Let attention see whole sequences. It raises RecipeError when it is called with what would be lost."""
        import ringmaster
        from torch.distributed.device_mesh import init_device_mesh
        from transformers import AttentionInterface

        text, size, device = model.config.get_text_config(), self.sequence_ranks, self.accelerator.device.type
        mesh = init_device_mesh(device, (self.data_ranks, size), mesh_dim_names=("data", "cp"))
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
                key, value = (for_every_rank(tensor, size) for tensor in (key, value))
                module.num_key_value_groups = query.shape[1] // key.shape[1]  # transformers repeats wide heads by it
            return shared(module, query, key, value, mask, **arguments)

        AttentionInterface.register(_SHARED, attend)
        model.set_attn_implementation(_SHARED if text is model.config else {"text_config": _SHARED})

    def take(self, batch: Batch[np.ndarray]) -> Batch[torch.Tensor]:
        """This process's part of a batch, on its device, to be passed forward and backward before the next is taken.

        Processes that share a sequence pass the same batch; its length must divide evenly among them. Their parts are
        packed, since that attention takes no mask.
        """
        positions, packed, part = batch.positions, batch.packed, slice(None)
        if self.sequence_ranks > 1:
            from ringmaster.runtime import get_runtime
            from ringmaster.shard import varlen_meta

            if positions is None:
                positions = np.broadcast_to(np.arange(batch.ids.shape[1]), batch.ids.shape)
            # attention reads it, also when the backward pass recomputes it
            get_runtime().varlen = varlen_meta(torch.tensor(positions), batch.ids.shape[1]) if packed else None
            tokens = batch.ids.shape[1] // self.sequence_ranks
            first = self.rank % self.sequence_ranks * tokens
            packed, part = True, slice(first, first + tokens)
        device = self.accelerator.device

        def placed(array: np.ndarray | None) -> Any:
            if array is None:
                return None
            tensor = torch.tensor(array[:, part])
            return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

        return Batch(placed(batch.ids), placed(batch.labels), placed(positions), packed, placed(batch.document_labels))

    def clip(self, parameters: Sequence[torch.nn.Parameter], max_norm: float) -> float | torch.Tensor:
        """Clip the gradient norm over all parameters and processes. Returns the norm before clipping."""
        norm = self.accelerator.clip_grad_norm_(parameters, max_norm)
        full = getattr(norm, "full_tensor", None)  # FSDP2 returns a sharded tensor
        return full() if full else norm

    @torch.no_grad()
    def all_finite(self, parameters: Iterable[torch.nn.Parameter]) -> bool:
        """Return whether all trained parameters are finite, on all processes, which call it together."""
        parts = [local_part(parameter) for parameter in parameters if parameter.requires_grad]
        finite = [part.isfinite().all() for part in parts]
        return self.total(~torch.stack(finite).all()) == [0]

    def least(self, number: int) -> int:
        """The smallest of the processes' numbers."""
        if self.world == 1:
            return number
        return int(self.accelerator.gather(torch.tensor([number], device=self.accelerator.device)).min())

    def state_to_save(self, wrapped: torch.nn.Module, *, only_trained: bool = False) -> dict[str, torch.Tensor] | None:
        """The inner model's full state on the CPU, on the main process; None on others. All processes must call it.

        only_trained: omit frozen parameters, if FSDP2 shards them.
        """
        if only_trained and self.engine == "fsdp2":
            parameters: Any = wrapped.named_parameters()
            trained = {name: parameter.detach() for name, parameter in parameters if parameter.requires_grad}
            state: dict[str, Any] = {name: shard.full_tensor().cpu() for name, shard in trained.items()}
        else:
            state = self.accelerator.get_state_dict(wrapped)
        if not self.is_main:
            return None
        inner = {name: value for name, value in state.items() if name.startswith("model.")}
        return {name.removeprefix("model."): value.detach().cpu() for name, value in inner.items()}


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


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor, which may be written to."""
    part = tensor.detach()
    return part.to_local() if isinstance(part, DTensor) else part


def for_every_rank(tensor: torch.Tensor, ranks: int) -> torch.Tensor:
    """Repeat the heads of keys or values, shape (batch, heads, tokens, width), until each process has as many."""
    heads = tensor.shape[1]
    return tensor.repeat_interleave(math.lcm(heads, ranks) // heads, dim=1) if heads % ranks else tensor
