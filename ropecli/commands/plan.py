"""`ropecli plan`: estimates the memory and time of fine-tuning."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_doc import Doc
from annotated_types import Gt, Interval

from ropecli.commands.options import RecipeFile, optional_path
from ropecli.errors import RecipeError
from ropecli.evaluation.request import TOKENS, CheckpointName, Revision
from ropecli.messages import size, warn
from ropecli.signature import Flag, command

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ropecli.checkpoint.opening import Checkpoint
    from ropecli.training.memory_plan.estimate import MemoryEstimator
    from ropecli.training.memory_plan.setups import Setup
    from ropecli.training.stages import Stage


@dataclass(frozen=True)
class TrainingPlan:
    """report: as written to JSON: memory part by part (bytes), operations, time (seconds), and which settings fit."""

    report: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        return self.report


@command
def plan(
    checkpoint: CheckpointName,
    *,
    length: Annotated[
        int | None,
        Interval(ge=2, le=2**31),
        TOKENS,
        Doc("Tokens per sequence. Default: the recipe's, or the context length."),
    ] = None,
    gpus: Annotated[int, Interval(ge=1, le=65536), Doc("Number of GPUs.")] = 1,
    gpu_memory: Annotated[str, Doc("Memory of one GPU, such as 80GB (10⁹ bytes) or 80GiB.")] = "80GB",
    host_memory: Annotated[
        str | None,
        Doc(
            "Main memory of one machine with up to 8 of the GPUs. Default: this machine's if it has a GPU, or no limit."
        ),
    ] = None,
    recipe: RecipeFile = None,
    settings: Annotated[
        Mapping[str, Any] | None, Flag("--set", metavar="KEY=VALUE"), Doc("A key of the recipe; repeatable.")
    ] = None,
    mfu: Annotated[
        float, Interval(gt=0, le=1), Doc("Model FLOP utilisation, 0 to 1. Long sequences usually reach 0.4.")
    ] = 0.4,
    gpu: Annotated[str, Doc("GPU model, for its speed: a100, h100, h200, b200, l40s, a6000, rtx4090.")] = "h100",
    gpu_flops: Annotated[float | None, Gt(0), Doc("Dense bfloat16 FLOPs per second of another GPU.")] = None,
    revision: Revision = None,
) -> TrainingPlan:
    """Estimate the memory and time that fine-tuning needs, and find settings that fit.

    Reads only config.json. GB means 10⁹ bytes. For a recipe with stages, plans the stage with the longest sequences.
    """
    import torch

    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.live.devices import total_memory
    from ropecli.training.memory_plan.estimate import GPUS
    from ropecli.training.memory_plan.setups import parse_size
    from ropecli.training.recipe_schema import make_recipe, recipe_path
    from ropecli.training.stages import plan_stages

    memory = parse_size(gpu_memory, "--gpu-memory")
    host = parse_size(host_memory, "--host-memory") if host_memory else None
    if host is None and torch.cuda.is_available():  # without a GPU, the training will run on another machine
        host = total_memory(torch.device("cpu"))
    if gpu_flops is None and gpu.lower() not in GPUS:
        raise RecipeError(f"Unknown --gpu {gpu!r}. Known: {', '.join(GPUS)}. For others, give --gpu-flops.")
    flops = GPUS[gpu.lower()] if gpu_flops is None else gpu_flops
    given = {**(settings or {}), **({} if length is None else {"length": length})}
    recipe_file = recipe_path(optional_path(recipe))
    # a recipe must name its data; a plan reads none, so any name will do
    placeholder = {} if recipe_file or given.keys() & {"data", "mixture"} else {"data": "DATA"}
    opened = open_checkpoint(checkpoint, revision=revision)
    stages = plan_stages(opened, make_recipe(recipe_file, {**placeholder, **given}))
    stage = max(stages, key=lambda stage: stage.length)
    if stage.length > stage.position_span:
        warn(
            f"{stage.length} tokens exceed the context length of {opened.name}, {stage.position_span}: patch it first."
        )
    return TrainingPlan(_make_report(opened, stage, gpus, memory, host, flops, mfu, recipe, given))


def _make_report(
    opened: "Checkpoint",
    stage: "Stage",
    gpus: int,
    memory: int,
    host: int | None,
    flops: float,
    mfu: float,
    recipe_name: str | Path | None,
    given: dict[str, Any],
) -> dict[str, Any]:
    """memory, host: bytes of a GPU, of a machine. flops: per second, of a GPU. given: recipe keys set by the user."""
    from ropecli.checkpoint.lint import faults_in_results
    from ropecli.checkpoint.state import read_state
    from ropecli.config.fields import section_of
    from ropecli.config.layers import kv_cache_bytes
    from ropecli.config.settings import read_settings
    from ropecli.live.stock_transformers import read_stock_config, stock_config_of
    from ropecli.training.memory_plan import setups
    from ropecli.training.memory_plan.estimate import MemoryEstimator, flops_of

    recipe, length = stage.recipe, stage.length
    patch = stage.in_effect  # of the recipe; None to train the checkpoint as it is
    config = stock_config_of(patch.config, opened.name) if patch else read_stock_config(opened.folder, opened.name)
    estimator = MemoryEstimator(config)
    candidates = setups.find_setups(estimator, recipe, length, gpus, memory, host or sys.maxsize)
    best = setups.best_setup(candidates)
    if best is None:
        raise RecipeError(f"Nothing fits: {_shortage(estimator.model, candidates, length, gpus, memory, host)}")
    command_of = partial(setups.launch_command, checkpoint=opened.name, length=length, recipe=recipe_name, given=given)
    step_tokens = recipe.batch_size * recipe.gradient_accumulation * best.launch.data_ranks * length
    step_flops = flops_of(estimator.shape, best.recipe, length, step_tokens)
    step_seconds = step_flops / (gpus * flops * mfu)
    estimate, written = best.estimate, patch.config if patch else opened.config
    settings = read_settings(written)
    return {
        "checkpoint": opened.name,
        "length": length,
        "gpus": gpus,
        "gpu_memory": memory,
        "host_memory": {"machine": host, **asdict(best.host)},
        "parameters": {
            "total": estimator.shape.total,
            "trained": estimate.trained,
            "active_per_token": estimator.shape.active,
        },
        "kv_cache": kv_cache_bytes(section_of(written), settings.family, settings.layers, length),
        "setting": _setup_name(best),
        "memory": {**estimate.parts(), "total": estimate.total, "host": estimate.host},
        "tokens_per_step": step_tokens,
        "tokens": step_tokens * recipe.steps,
        "steps": recipe.steps,
        "flops_per_step": step_flops,
        "flops": step_flops * recipe.steps,
        "mfu": mfu,
        "gpu_flops": flops,
        "seconds_per_step": step_seconds,
        "seconds": step_seconds * recipe.steps,
        "options": [_setup_row(setup) for setup in candidates],
        "command": command_of(best),
        "alternatives": [
            {"setting": _setup_name(setup), "command": command_of(setup)}
            for setup in setups.alternatives_to(best, candidates)
        ],
        "notes": list(_notes(estimator, best, length)),
        # a patch writes new RoPE fields
        "findings": [] if patch else [finding._asdict() for finding in faults_in_results(read_state(opened))],
    }


def _setup_row(setup: "Setup") -> dict[str, Any]:
    return {
        "adapter": setup.changes.get("adapter", setup.recipe.adapter),
        "engine": setup.launch.name,
        "changes": setup.changes,
        "gradient_checkpointing": setup.recipe.gradient_checkpointing is True,
        "bytes": None if setup.refused else setup.estimate.total,
        "host": None if setup.refused else setup.estimate.host,
        "host_memory": None if setup.refused else asdict(setup.host),
        "fits": setup.fits,
        "refused": setup.refused,
    }


def _notes(estimator: "MemoryEstimator", best: "Setup", length: int) -> Iterator[str]:
    """The sentences below the table."""
    from ropecli.training.memory_plan.estimate import flops_of

    if not estimator.fake_steps.tileable:
        yield f"tiled_mlp was not tried: {type(estimator.model).__name__} has no MLP that treats each token alone."
    attention = replace(estimator.shape, matmul=0)
    share = 1 - flops_of(attention, best.recipe, length, 1) / flops_of(estimator.shape, best.recipe, length, 1)
    # torchao 0.18, float8/float8_linear.py: casts the operands of each product, and saves them as they are
    yield (
        f"FP8 would compute products with weights in 8 bits, at most {share:.0%} of these FLOPs; attention, weights, "
        "optimizer state and activations stay as they are. It has not run on a GPU, so finetune does not offer it."
    )


def _shortage(
    model: "PreTrainedModel", candidates: "Sequence[Setup]", length: int, gpus: int, memory: int, host: int | None
) -> str:
    """The memory that is missing, and the next step. memory, host: bytes of a GPU, of a machine."""
    possible = [setup for setup in candidates if not setup.refused]
    # of the setups that fit the GPU, the one with the least main memory
    least = min(possible, key=lambda setup: (setup.estimate.total > memory, setup.host.most))
    if host and least.estimate.total <= memory:
        return (
            f"training takes at least {size(least.host.most)} of main memory on one machine ({_setup_name(least)}); it "
            f"has {size(host)}. Use a machine with more memory, or plan for another one with --host-memory."
        )
    least = min(possible, key=lambda setup: setup.estimate.total)
    return (
        f"training at {length} tokens takes at least {size(least.estimate.total)} on each of "
        f"{gpus} GPU{'s'[: gpus > 1]} ({_setup_name(least)}); one has {size(memory)}. {_advice(model, least, memory)}"
    )


def _advice(model: "PreTrainedModel", setup: "Setup", memory: int) -> str:
    """The next step if even this setup does not fit. Names the largest tensor if it takes half of `memory`, a GPU's."""
    largest = setup.estimate.largest
    if largest.size < memory / 2:
        return "Increase --gpus or shorten --length."
    # a sequence that GPUs share makes this tensor smaller
    shorten = "increase --gpus or shorten --length." if setup.launch.sequence_ranks > 1 else "shorten --length."
    takes = size(largest.size)
    if not largest.pairs:
        return f"One tensor of {largest.module} takes {takes}: {shorten}"
    attention = model.config._attn_implementation if setup.recipe.attn == "auto" else setup.recipe.attn
    # a model that lists flash kernels runs those, not flash_attention_2
    flash = getattr(model, "_compatible_flash_implementations", None) is None and model._supports_flash_attn
    supported = {"sdpa": model._supports_sdpa, "flash_attention_2": flash, "flex_attention": model._supports_flex_attn}
    alternatives = [name for name, is_supported in supported.items() if is_supported and name != attention]
    instead = f"use --set attn={alternatives[0]} or " if alternatives else ""
    return (
        f"attn: {attention} stores a value for every pair of tokens, {takes} in one tensor of {largest.module}: "
        f"{instead}{shorten}"
    )


def _setup_name(setup: "Setup") -> str:
    adapters = {"none": "all parameters", "lora": "LoRA", "lora-plus": "LoRA+", "qlora": "QLoRA"}
    settings = short_changes(setup.changes, checkpointing=setup.recipe.gradient_checkpointing is True)
    return ", ".join([adapters[setup.recipe.adapter], TRAINING_ENGINES[setup.launch.name], *settings])


TRAINING_ENGINES = {"one": "one GPU", "ddp": "DDP", "fsdp2": "FSDP2", "fsdp2-cp": "FSDP2 + CP", "ulysses": "Ulysses"}


def short_changes(changes: dict[str, Any], *, checkpointing: bool) -> list[str]:
    """The changes of a setup, in a word or two each. checkpointing: whether it recomputes layers, changed or not."""
    words = {"offload_activations": "offload", "optimizer": "8-bit AdamW", "tiled_mlp": "tiled MLP"}
    return ["checkpointing"] * checkpointing + [words[key] for key in changes if key in words]
