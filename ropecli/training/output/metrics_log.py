"""Logs a run's metrics: metrics.jsonl always, TensorBoard or Weights & Biases through Accelerate if there.

A tracker gets the same numbers as metrics.jsonl. One that fails never ends a run.
"""

import contextlib
import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropecli.atomic import new_file
from ropecli.errors import OutputError, RecipeError, reason_of
from ropecli.training.recipe import Recipe

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker

METRICS = "metrics.jsonl"
LOGS = "logs"
_PROJECT = "ropecli"
_RUN_ID = "wandb-run-id"


class MetricsLog:
    """metrics.jsonl, cut back to the step that a resumed run starts from."""

    def __init__(self, output: Path, step: int) -> None:
        self._path = output / METRICS
        text = "".join(f"{json.dumps(values)}\n" for values in metrics_until(output, step))
        with new_file(self._path) as partial:
            partial.write_text(text, encoding="utf-8")

    def write(self, values: dict[str, Any]) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(values) + "\n")
        except OSError as error:
            raise OutputError(f"{self._path} could not be written: {error.strerror}. --resume goes on.") from error


def metrics_until(output: Path, step: int) -> list[dict[str, Any]]:
    """What metrics.jsonl says, up to `step`, but for lines that a kill or a hand has spoilt. Raises OutputError."""
    path = output / METRICS
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise OutputError(f"{path} cannot be read: {error.strerror}. Move it away; --resume then goes on.") from error
    return [values for values in map(_parsed, lines) if values and values["step"] <= step]


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) and isinstance(values.get("step"), int) else None


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


class Trackers(contextlib.AbstractContextManager["Trackers", None]):
    """What a run's numbers are told to, beside metrics.jsonl, while it lasts.

    make: gives one of Accelerate's trackers, told the step of the first line; None to stay silent. It is started with
    that line, so that what an earlier attempt logged of this step and later ones can be taken back. run_values: what
    the run is, plain values. say: told of a tracker that fails, which is then left out.
    """

    def __init__(
        self,
        accelerator: "Accelerator",
        make: "Callable[[int], GeneralTracker] | None",
        run_values: Mapping[str, Any],
        say: Callable[[str], None],
    ) -> None:
        self._accelerator = accelerator
        self._make = make
        self._run_values = run_values
        self._say = say

    def log(self, values: Mapping[str, Any]) -> None:
        """values: a line of metrics.jsonl. Its numbers are told by their names, those of a mapping as ppl/256."""
        numbers = dict(_numbers(values))
        step = int(numbers.pop("step"))
        if self._make:
            make, self._make = self._make, None
            self._attempt(lambda: self._start(make(step)))
        self._attempt(lambda: self._accelerator.log(numbers, step=step))

    def __exit__(self, *error: object) -> None:
        """Writes what waits to be written."""
        for tracker in self._take_away():
            self._attempt(tracker.finish)

    def _start(self, tracker: "GeneralTracker") -> None:
        self._accelerator.log_with = [tracker]
        # TensorBoard would make a run of its own of the settings, each time anew; they are in run.yaml
        config = dict(self._run_values) if tracker.name == "wandb" else None
        self._accelerator.init_trackers(_PROJECT, config=config)

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # no network, no login, a full disk: each tracker has its own kinds
            for tracker in self._take_away():
                with contextlib.suppress(Exception):
                    tracker.finish()
            reason = reason_of(error).rstrip(".")
            self._say(f"warning: the tracker failed and is left out: {reason}. metrics.jsonl goes on.")

    def _take_away(self) -> "list[GeneralTracker]":
        trackers = list(self._accelerator.trackers)
        self._accelerator.trackers.clear()
        return trackers


def open_trackers(
    accelerator: "Accelerator",
    recipe: Recipe,
    output: Path,
    run_values: Mapping[str, Any],
    say: Callable[[str], None],
) -> Trackers:
    """The recipe's tracker, on the main process. To be left before accelerator.end_training().

    Raises RecipeError as choose_tracker does; afterwards nothing.
    """
    name = choose_tracker(recipe.tracker)
    if name is None or not accelerator.is_main_process:
        return Trackers(accelerator, None, run_values, say)
    make = {"tensorboard": _tensorboard, "wandb": _wandb}[name]
    return Trackers(accelerator, lambda step: make(output, step), run_values, say)


def _numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float):
            yield f"{prefix}{key}", value


def _tensorboard(output: Path, step: int) -> "GeneralTracker":
    from accelerate.tracking import TensorBoardTracker

    # no name of the run below the folder: the folder is the run's own
    return TensorBoardTracker("", str(output / LOGS), purge_step=step)


def _wandb(output: Path, step: int) -> "GeneralTracker":
    """Of steps that are made again W&B keeps the first values, which are the same. From the start it is a new run."""
    from accelerate.tracking import WandBTracker

    _refuse_without_login()
    logs = output / LOGS
    logs.mkdir(exist_ok=True)
    kept = logs / _RUN_ID
    if step <= 1 or not kept.exists():
        kept.write_text(uuid.uuid4().hex[:8], encoding="utf-8")
    run = kept.read_text(encoding="utf-8").strip()
    return WandBTracker(_PROJECT, dir=str(logs), name=output.name, id=run, resume="allow")


def _refuse_without_login() -> None:
    """Raises RuntimeError where W&B would ask for a login at the terminal, and the run wait for the answer."""
    import wandb

    if wandb.setup().settings.mode == "online" and not wandb.login(timeout=1):
        raise RuntimeError("Weights & Biases has no login here; `wandb login`, or set WANDB_MODE=offline")
