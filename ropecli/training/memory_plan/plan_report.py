"""The report of `ropecli plan`: memory, operations and time of the best setup, and the others that were tried."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropecli.checkpoint.lint import faults_in_results
from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.state import read_state
from ropecli.config.fields import section_of
from ropecli.config.layers import kv_cache_bytes
from ropecli.config.settings import read_settings
from ropecli.errors import RecipeError
from ropecli.live.stock_transformers import stock_config_of
from ropecli.messages import size
from ropecli.names import ADAPTERS
from ropecli.training.memory_plan.estimate import MemoryEstimator, flops_of
from ropecli.training.memory_plan.hardware import TRAINING_ENGINES
from ropecli.training.memory_plan.setups import Setup, best_setup, find_setups, launch_command
from ropecli.training.stages import Stage

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def make_report(
    opened: Checkpoint,
    stage: Stage,
    stages: int,
    gpus: int,
    memory: int,
    host: int | None,
    flops: float,
    mfu: float,
    recipe_name: str | Path | None,
    given: dict[str, Any],
) -> dict[str, Any]:
    """memory, host: bytes of a GPU, of a machine. flops: per second, of a GPU. given: recipe keys set by the user."""
    recipe, length = stage.recipe, stage.length
    estimator = MemoryEstimator(stock_config_of(stage.config, opened.name))
    setups = find_setups(estimator, recipe, length, gpus, memory, host or sys.maxsize)
    best = best_setup(setups)
    if best is None:
        raise RecipeError(f"Nothing fits: {_shortage(estimator.model, setups, length, gpus, memory, host)}")
    step_tokens = recipe.batch_size * recipe.gradient_accumulation * best.launch.data_ranks * length
    step_flops = flops_of(estimator.shape, best.recipe, length, step_tokens, stage.positions.pretraining_length)
    step_seconds = step_flops / (gpus * flops * mfu)
    estimate, settings = best.estimate, read_settings(stage.config)
    return {
        "checkpoint": opened.name,
        "length": length,
        "stage": stage.number,
        "stages": stages,
        "gpus": gpus,
        "gpu_memory": memory,
        "host_memory": {"machine": host, "needed": best.host},
        "parameters": {
            "total": estimator.shape.total,
            "trained": estimate.trained,
            "active_per_token": estimator.shape.active,
        },
        "kv_cache": kv_cache_bytes(section_of(stage.config), settings.family, settings.layers, length),
        "setting": _name(best),
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
        "options": [_row(setup) for setup in setups],
        "command": launch_command(best, opened.name, length, recipe_name, given),
        # a patch writes new RoPE fields
        "findings": [] if stage.in_effect else [finding.as_json() for finding in faults_in_results(read_state(opened))],
    }


def _row(setup: Setup) -> dict[str, Any]:
    return {
        "adapter": setup.recipe.adapter,
        "engine": setup.launch.name,
        "changes": setup.changes,
        "settings": setup.settings,
        "bytes": None if setup.refused else setup.estimate.total,
        "host_memory": None if setup.refused else setup.host,
        "fits": setup.fits,
        "refused": setup.refused,
    }


def _shortage(
    model: "PreTrainedModel", setups: Sequence[Setup], length: int, gpus: int, memory: int, host: int | None
) -> str:
    """The memory that is missing, and the next step. memory, host: bytes of a GPU, of a machine."""
    possible = (setup for setup in setups if not setup.refused)  # one GPU and DDP are never refused
    least = min(possible, key=lambda setup: setup.estimate.total)
    if host and least.estimate.total <= memory:
        return (
            f"training takes {size(least.host)} of main memory on one machine ({_name(least)}); it has {size(host)}. "
            "Use a machine with more memory, or plan for another one with --host-memory."
        )
    attention = model.config._attn_implementation if least.recipe.attn == "auto" else least.recipe.attn
    other = " Or --set attn=flex_attention or sdpa: eager stores a value for every pair of tokens."
    return (
        f"training at {length} tokens takes at least {size(least.estimate.total)} on each of {gpus} "
        f"GPU{'s'[: gpus > 1]} ({_name(least)}); one has {size(memory)}. Increase --gpus or shorten --length."
        f"{other if attention == 'eager' else ''}"
    )


def _name(setup: Setup) -> str:
    return ", ".join([ADAPTERS[setup.recipe.adapter], TRAINING_ENGINES[setup.launch.name], *setup.settings])
