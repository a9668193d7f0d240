"""Distributed training: DDP, FSDP2, DeepSpeed ZeRO, and sequence parallelism.

Accelerate provides the engines, configured by `accelerate launch`; this file handles their differences. Sequence
parallelism is DeepSpeed Ulysses (Jacobs et al. 2023, arXiv:2309.14509) with sp_size, or torch's context parallelism
with cp_size.
"""

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch

from ropecli.data.sequences import UNSCORED
from ropecli.data.stream import Batch
from ropecli.errors import RecipeError, RopecliError, reason_of
from ropecli.training.recipe_schema import Recipe
from ropecli.training.refusals import (
    context_ranks,
    is_launched_with,
    refuse_engine,
    refuse_launch,
    shards_weights,
    ulysses_ranks,
)

if TYPE_CHECKING:
    from accelerate import Accelerator

_SILENCE = timedelta(minutes=15)
"""Time after which a process ends that hears nothing from one that it waits for: a host may have vanished."""
_HEARTBEAT = 10.0
"""Seconds between signs of life."""
_LOOK = 1.0
"""Seconds between looks at them: all processes ask one store."""
_waits = itertools.count()
_PLAIN = Recipe.model_validate({"data": "demo-train", "mixed_precision": "none", "gradient_accumulation": 1})
"""For training without a recipe, as by `ropecli tune`."""


class LocalBatch(NamedTuple):
    """One process's part of a batch, on its device: the arguments of NextTokenLoss.forward.

    ids, labels: shape (sequences, tokens of this process). positions: the same shape, or None for 0, 1, 2 ...
    document_labels: the same shape, or None.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor | None
    packed: bool
    document_labels: torch.Tensor | None


def make_accelerator(recipe: Recipe = _PLAIN, **options: Any) -> "Accelerator":
    """Create the Accelerator for the engine chosen by `accelerate launch` or torchrun, with the recipe's settings.

    options: other arguments of Accelerator. Raises RecipeError for an engine that cannot be used.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs

    refuse_launch()
    AcceleratorState._reset_state()  # otherwise a second run in this process keeps the first run's settings
    cuda = torch.cuda.is_available()
    deepspeed = is_launched_with("DEEPSPEED")
    # with cpu=True Accelerate ignores DeepSpeed, and without a backend it assumes one process
    backend = "gloo" if deepspeed and not cuda else "nccl"  # nccl is Accelerate's name for the device's own
    options["kwargs_handlers"] = [InitProcessGroupKwargs(backend=backend, timeout=_SILENCE)]
    if deepspeed:
        options["deepspeed_plugin"] = _deepspeed_plugin(recipe)
    try:
        accelerator = Accelerator(
            mixed_precision="no" if recipe.mixed_precision == "none" else recipe.mixed_precision,
            cpu=not cuda and not deepspeed,
            # a plugin, since the launch's environment variables override a number
            gradient_accumulation_plugin=GradientAccumulationPlugin(recipe.gradient_accumulation),
            **options,
        )
    except (ValueError, NotImplementedError, ImportError) as error:
        raise RecipeError(f"Accelerate cannot use this launch configuration: {reason_of(error)}") from error
    refuse_engine(accelerator)
    show_life(accelerator)
    if deepspeed:
        from transformers.integrations import unset_hf_deepspeed_config

        # otherwise transformers loads sharded weights under ZeRO-3, but the test of the head needs full ones
        unset_hf_deepspeed_config()
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)  # it logs to standard output
    if cuda and recipe.mixed_precision == "bf16":
        # use TF32 for the head, whose matrix products stay in float32 and are slow otherwise
        torch.set_float32_matmul_precision("high")
    return accelerator


def _deepspeed_plugin(recipe: Recipe) -> Any:
    """The launch's DeepSpeed config with the recipe's settings. DeepSpeed clips and accumulates itself."""
    from accelerate import DeepSpeedPlugin

    plugin = DeepSpeedPlugin()
    settings = plugin.deepspeed_config
    for key in ("optimizer", "scheduler"):
        if key in settings:
            raise RecipeError(f"The DeepSpeed config has {key!r}, which the recipe sets. Remove it there.")
    settings.update(
        train_micro_batch_size_per_gpu=recipe.batch_size,
        gradient_accumulation_steps=recipe.gradient_accumulation,
        gradient_clipping=recipe.max_grad_norm,
    )
    settings.pop("train_batch_size", None)  # follows from these and the number of processes
    settings["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    return plugin


def wait_for(accelerator: "Accelerator", ranks: Iterable[int]) -> None:
    """Wait until these processes have called this as often as this one. All processes call it.

    Unlike a collective operation it has no time limit while the others live, and signals are handled. Raises
    RopecliError for a process without a sign of life, or if the store, which is on the first host, is gone.
    """
    if accelerator.num_processes == 1:
        return
    from torch.distributed.distributed_c10d import _get_default_store

    store, call = _get_default_store(), next(_waits)
    keys = {rank: f"ropecli/{call}/{rank}" for rank in ranks}
    heard: dict[int, tuple[bytes, float]] = {}
    look = time.monotonic()
    try:
        store.set(f"ropecli/{call}/{accelerator.process_index}", "")
        while not store.check([*keys.values()]):
            time.sleep(0.05)
            if time.monotonic() < look:
                continue
            look = time.monotonic() + _LOOK
            for rank in [rank for rank, key in keys.items() if not store.check([key])]:
                sign = store.get(f"ropecli/alive/{rank}") if store.check([f"ropecli/alive/{rank}"]) else b""
                last, since = heard.setdefault(rank, (sign, time.monotonic()))
                if sign != last:
                    heard[rank] = sign, time.monotonic()
                elif time.monotonic() - since > _SILENCE.total_seconds():
                    raise RopecliError(f"Process {rank} of this run gave no sign of life for {_SILENCE}.")
    except RuntimeError as error:  # of the store
        raise RopecliError(f"Lost the connection to the first process of this run: {reason_of(error)}") from error


def show_life(accelerator: "Accelerator") -> None:
    """Start giving signs of life to processes that wait for this one."""
    if accelerator.num_processes == 1:
        return
    from torch.distributed.distributed_c10d import _get_default_store

    store, key = _get_default_store(), f"ropecli/alive/{accelerator.process_index}"

    def beat() -> None:
        with contextlib.suppress(RuntimeError):  # the run has ended
            for number in itertools.count():
                store.set(key, str(number))
                time.sleep(_HEARTBEAT)

    threading.Thread(target=beat, daemon=True).start()


@contextlib.contextmanager
def local_main_first(accelerator: "Accelerator") -> Iterator[None]:
    """Run the block on the first process of each host, then on its others."""
    first = accelerator.process_index - accelerator.local_process_index
    if not accelerator.is_local_main_process:
        wait_for(accelerator, [first])
    yield
    if accelerator.is_local_main_process:
        wait_for(accelerator, [first])


def sequence_ranks(accelerator: "Accelerator") -> int:
    """Number of processes that share each sequence."""
    return ulysses_ranks(accelerator) * context_ranks(accelerator)


def data_ranks(accelerator: "Accelerator") -> tuple[int, int]:
    """(rank, number of ranks) among the processes that read different sequences."""
    shared = sequence_ranks(accelerator)  # sequence parallelism is the innermost dimension of both meshes
    return accelerator.process_index // shared, accelerator.num_processes // shared


def averaged_over(accelerator: "Accelerator") -> int:
    """Divisor that the engine applies to the sum of all gradients: usually the number of processes.

    DeepSpeed sums over the processes that share a sequence, without averaging. ZeRO-3 does so only without
    reduce-scatter (stage_1_and_2.py and stage3.py of DeepSpeed 0.19: division by sequence_parallel_size, and none in
    reduce_scatter_coalesced).
    """
    if ulysses_ranks(accelerator) == 1:
        return accelerator.num_processes
    zero = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
    if zero["stage"] == 3 and zero.get("reduce_scatter", True):
        return accelerator.num_processes
    return accelerator.num_processes // ulysses_ranks(accelerator)


def prepare(accelerator: "Accelerator", loss_of: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """Call accelerator.prepare with the settings that Accelerate would read from a bare transformers model."""
    from accelerate import DistributedType

    model: Any = loss_of.model
    if accelerator.distributed_type == DistributedType.FSDP:
        plugin = accelerator.state.fsdp_plugin
        plugin.cpu_ram_efficient_loading = False  # sharded_weights.py reads the weights after sharding
        if plugin.transformer_cls_names_to_wrap is None:
            plugin.transformer_cls_names_to_wrap = sorted(model._no_split_modules or ())
        if plugin.mixed_precision_policy is not None:
            from torch.distributed.fsdp import MixedPrecisionPolicy

            # Accelerate's default rounds the loss, a sum over many tokens, to bfloat16, and reduces gradients in it
            plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if shards_weights(accelerator) and accelerator.distributed_type == DistributedType.DEEPSPEED:
        import deepspeed

        # partition now: DeepSpeed would first move the whole model to each device
        deepspeed.zero.Init(module=model, config_dict_or_path=accelerator.state.deepspeed_plugin.deepspeed_config)
    if ulysses_ranks(accelerator) > 1:
        accelerator.parallelism_config.sp_handler.sp_attn_implementation = model.config._attn_implementation
    return accelerator.prepare(loss_of, optimizer)


@contextlib.contextmanager
def local_batch(accelerator: "Accelerator", batch: Batch) -> Iterator[LocalBatch]:
    """Yield this process's part of a batch, on its device. Run the forward and backward pass inside the context.

    Processes that share a sequence pass the same batch; its length must divide evenly among them.
    """
    ulysses = ulysses_ranks(accelerator)
    if ulysses > 1:
        batch = _filled(batch, accelerator.state.deepspeed_plugin.get_value("train_micro_batch_size_per_gpu"))
    positions = batch.positions
    if positions is None and sequence_ranks(accelerator) > 1:
        positions = np.broadcast_to(np.arange(batch.ids.shape[1]), batch.ids.shape)
    part = slice(None)
    if ulysses > 1:
        tokens = batch.ids.shape[1] // ulysses
        first = accelerator.process_index % ulysses * tokens
        part = slice(first, first + tokens)

    def placed(array: np.ndarray) -> torch.Tensor:
        return torch.tensor(array[:, part], device=accelerator.device)

    share = LocalBatch(
        placed(batch.ids),
        placed(batch.labels),
        None if positions is None else placed(positions),
        batch.packed,
        None if batch.document_labels is None else placed(batch.document_labels),
    )
    if context_ranks(accelerator) > 1:
        # splits the tensors in place, and makes attention exchange keys and values
        tensors = [tensor for tensor in share if isinstance(tensor, torch.Tensor)]
        with accelerator.maybe_context_parallel(tensors, [1] * len(tensors), set(tensors)):
            yield share
    else:
        yield share


def _filled(batch: Batch, rows: int) -> Batch:
    """Add rows that are not scored: Ulysses needs batches of a fixed size."""
    shape = (rows, batch.ids.shape[1])
    labels = np.full(shape, UNSCORED)
    labels[: len(batch.labels)] = batch.labels
    positions, counts = (
        None if rows is None else np.resize(rows, shape) for rows in (batch.positions, batch.document_labels)
    )
    return replace(batch, ids=np.resize(batch.ids, shape), labels=labels, positions=positions, document_labels=counts)


def clip_gradients(accelerator: "Accelerator", parameters: Sequence[torch.nn.Parameter], max_norm: float) -> float:
    """Clip the gradient norm over all parameters and processes. Returns the norm before clipping.

    DeepSpeed has already clipped and updated by then, in the backward pass of the step's last micro-batch.
    """
    norm = accelerator.clip_grad_norm_(parameters, max_norm)
    full = getattr(norm, "full_tensor", None)  # FSDP2 returns a sharded tensor
    return float(full() if full else norm)


@torch.no_grad()
def all_finite(accelerator: "Accelerator", parameters: Iterable[torch.nn.Parameter]) -> bool:
    """Return whether all trained parameters are finite, on all processes, which call it together."""

    def own_part(parameter: Any) -> torch.Tensor:
        held = getattr(parameter, "ds_tensor", parameter)  # under ZeRO-3 the parameter itself is empty
        return held.to_local() if hasattr(held, "to_local") else held

    finite = all(own_part(parameter).isfinite().all() for parameter in parameters if parameter.requires_grad)
    if accelerator.num_processes == 1:
        return finite
    return bool(accelerator.gather(torch.tensor([finite], device=accelerator.device)).all())


def state_to_save(
    accelerator: "Accelerator", wrapped: torch.nn.Module, *, only_trained: bool = False
) -> dict[str, torch.Tensor] | None:
    """The inner model's full state on the CPU, on the main process; None on others. All processes must call it.

    only_trained: omit frozen parameters, if FSDP2 shards them.
    """
    from accelerate import DistributedType

    if only_trained and accelerator.distributed_type == DistributedType.FSDP:
        parameters: Any = wrapped.named_parameters()
        trained = {name: parameter.detach() for name, parameter in parameters if parameter.requires_grad}
        state: dict[str, Any] = {name: shard.full_tensor().cpu() for name, shard in trained.items()}
    else:
        state = accelerator.get_state_dict(wrapped)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        from deepspeed.utils import safe_get_full_fp32_param

        # float32 from its optimizer: in bf16 the model's own are rounded. All processes gather them together
        state = dict(state or {})
        for name, parameter in cast(Any, wrapped).module.named_parameters(remove_duplicate=False):
            master = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
            if accelerator.is_main_process and master is not None:
                state[name] = master.view(getattr(parameter, "ds_shape", parameter.shape)).cpu()
    if not accelerator.is_main_process:
        return None
    inner = {name: value for name, value in state.items() if name.startswith("model.")}
    return {name.removeprefix("model."): value.detach().cpu() for name, value in inner.items()}


def leave_group(accelerator: "Accelerator") -> None:
    """Leave the process group before this process exits; otherwise gloo's threads may abort."""
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    accelerator.end_training()
