"""Logs a run's metrics: metrics.jsonl always; TensorBoard or Weights & Biases through Accelerate."""

import json
import math
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ropecli.atomic import new_file
from ropecli.errors import OutputError, RecipeError

METRICS = "metrics.jsonl"
LOGS = "logs"
_PROJECT = "ropecli"


def choose_tracker(name: str) -> str | None:
    """'tensorboard', 'wandb' or None for a recipe's `tracker`: auto is TensorBoard where it is installed.

    Raises RecipeError for one that is asked for by name and is not installed.
    """
    if name == "auto":
        return "tensorboard" if find_spec("tensorboard") else None
    if name == "none":
        return None
    if not find_spec(name):
        raise RecipeError(f"tracker: {name} is not installed here. `pip install {name}`, or take tracker: none.")
    return name


class RunLog:
    """metrics.jsonl and the tracker, which gets the same numbers. To be written to by all processes alike.

    done: steps that a resumed run keeps; None for one that starts, where the log is cut back to nothing. run_values:
    what the run is, for the tracker.
    """

    def __init__(self, accelerator: Any, output: Path, done: int | None, run_values: Mapping[str, Any]) -> None:
        self._accelerator = accelerator
        self._path = output / METRICS
        if accelerator.is_main_process:
            kept = metrics_until(output, -1 if done is None else done)
            with new_file(self._path) as partial:
                partial.write_text("".join(f"{json.dumps(values)}\n" for values in kept), encoding="utf-8")
        if accelerator.log_with:
            (output / LOGS).mkdir(exist_ok=True)
            options = {
                # what an earlier attempt logged of the steps that are run again is hidden
                "tensorboard": {"purge_step": 0 if done is None else done + 1},
                # the environment variables WANDB_RUN_ID and WANDB_RESUME make a resumed run one with the earlier
                "wandb": {"name": output.name, "dir": str(output / LOGS), "config": dict(run_values)},
            }
            accelerator.init_trackers(_PROJECT, init_kwargs=options)

    def close(self) -> None:
        """Has the tracker write what waits to be written."""
        for tracker in self._accelerator.trackers:
            tracker.finish()

    def write(self, values: dict[str, Any]) -> None:
        """A line of metrics.jsonl; the tracker gets its numbers by their names, those of a mapping as ppl/256."""
        numbers = dict(_numbers(values))
        self._accelerator.log(numbers, step=int(numbers.pop("step")))
        if not self._accelerator.is_main_process:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(values) + "\n")
        except OSError as error:
            raise OutputError(f"{self._path} could not be written: {error.strerror}. Continue by --resume.") from error


def metrics_until(output: Path, step: int) -> list[dict[str, Any]]:
    """What metrics.jsonl says, up to `step`, but for lines that a kill has cut short. Raises OutputError."""
    path = output / METRICS
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise OutputError(f"{path} cannot be read: {error.strerror}. Move it away, and use --resume.") from error
    return [values for values in map(_parsed, lines) if values and values["step"] <= step]


def losses_until(output: Path, step: int) -> dict[int, float]:
    """The losses by step, up to `step`, that a run's metrics.jsonl holds. Raises OutputError."""
    losses = ((values["step"], values.get("loss")) for values in metrics_until(output, step))  # evaluations have none
    return {at: loss for at, loss in losses if isinstance(loss, float) and math.isfinite(loss)}


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) and isinstance(values.get("step"), int) else None


def _numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float):
            yield f"{prefix}{key}", value
