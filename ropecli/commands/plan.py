"""`ropecli plan`: estimates the memory and time of fine-tuning."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_doc import Doc

from ropecli.atomic import optional_path
from ropecli.errors import RecipeError
from ropecli.messages import say_opening, warn
from ropecli.options import TOKENS, CheckpointName, Revision
from ropecli.signature import Flag, Interval, command
from ropecli.training.recipe_files import RecipeFile, recipe_path


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
    gpu_flops: Annotated[float | None, Interval(gt=0), Doc("Dense bfloat16 FLOPs per second of another GPU.")] = None,
    revision: Revision = None,
) -> TrainingPlan:
    """Estimate memory and time of fine-tuning, and find what fits.

    Reads only config.json. GB means 10⁹ bytes. For a recipe with stages, plans the stage with the longest sequences.
    """
    from ropecli.training.memory_plan.hardware import GPUS, parse_size

    if gpu_flops is None and gpu.lower() not in GPUS:
        raise RecipeError(f"Unknown --gpu {gpu!r}. Known: {', '.join(GPUS)}. For others, give --gpu-flops.")
    flops = GPUS[gpu.lower()] if gpu_flops is None else gpu_flops
    memory = parse_size(gpu_memory, "--gpu-memory")
    host = parse_size(host_memory, "--host-memory") if host_memory else None
    say_opening(checkpoint)
    import torch

    from ropecli.checkpoint.advice import how_to_read
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.checkpoint.state import read_state
    from ropecli.live.devices import total_memory
    from ropecli.training.memory_plan.plan_report import make_report
    from ropecli.training.recipe_schema import make_recipe
    from ropecli.training.stages import plan_stages

    if host is None and torch.cuda.is_available():  # without a GPU, the training will run on another machine
        host = total_memory(torch.device("cpu"))
    given = {**(settings or {}), **({} if length is None else {"length": length})}
    recipe_file = recipe_path(optional_path(recipe))
    # a recipe must name its data; a plan reads none, so any name will do
    placeholder = {} if recipe_file or given.keys() & {"data", "mixture"} else {"data": "DATA"}
    opened = open_checkpoint(checkpoint, revision=revision)
    stages = plan_stages(opened, make_recipe(recipe_file, {**placeholder, **given}))
    stage = max(stages, key=lambda stage: stage.length)
    if stage.length > stage.position_span:
        more = how_to_read(read_state(opened), stage.length)
        warn(f"{stage.length} tokens exceed the context length of {opened.name}, {stage.position_span}. {more}")
    return TrainingPlan(make_report(opened, stage, len(stages), gpus, memory, host, flops, mfu, recipe, given))
