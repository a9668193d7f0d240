"""The folder of a training run: its settings, metrics and training checkpoints.

OUTPUT/run.yaml              recipe, source, and what follows; resuming requires the same
OUTPUT/metrics.jsonl         one line per step and per validation
OUTPUT/logs/                 the same numbers for TensorBoard or Weights & Biases, through Accelerate
OUTPUT/checkpoints/000040/   Accelerate's state after 40 steps (ropecli/resume.py); removed when the run is finished
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from ropecli.atomic import new_file, refuse_existing
from ropecli.checkpoint.files import RUN, STAGES, read_file
from ropecli.errors import OutputError, RecipeError, reason_of
from ropecli.live.stock_transformers import quiet_transformers
from ropecli.resume import (
    append_record,
    begin_snapshot,
    complete_snapshot,
    list_snapshots,
    prune_snapshots,
    read_records,
    refuse_other_request,
    snapshot_fault,
    snapshot_path,
)
from ropecli.training.launch import Launch
from ropecli.training.recipe_schema import MAY_CHANGE
from ropecli.yaml12 import read_own_yaml

CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"
LOGS = "logs"
LOCK = ".lock"
# where the source is may change (its digest may not)
_MAY_CHANGE = rf"source\.(checkpoint|revision|commit)|((recipe|resolved)\.)?({'|'.join(MAY_CHANGE)})"


def refuse_foreign(output: Path, resume: bool) -> None:
    """Raise OutputError for a folder that contains anything but a run to resume, and for a damaged run.yaml."""
    if (output / RUN).exists() or (output / STAGES).is_dir():
        if not resume:
            raise OutputError(f"{output} already contains a run. Use --resume to continue it, or another --output.")
        read_run(output)
    elif not output.is_dir() or any(not path.name.startswith(".") for path in output.iterdir()):
        refuse_existing(output)


def refuse_other_run(output: Path, settings: dict[str, Any]) -> None:
    """Raise RecipeError if run.yaml has other values of these settings. Raises OutputError for a damaged one."""
    if before := read_run(output):
        refuse_other_request({key: before.get(key) for key in settings}, settings, output, _MAY_CHANGE)


def begin_run(output: Path, settings: dict[str, Any]) -> None:
    """Write run.yaml, or compare it with the settings of a resumed run. Raises OutputError, RecipeError."""
    refuse_other_run(output, settings)
    if not (output / RUN).exists():
        with new_file(output / RUN) as partial:
            partial.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")


def read_run(output: Path) -> dict[str, Any]:
    """Read run.yaml; empty for a new run. Raises OutputError for a damaged one."""
    path = output / RUN
    return read_file(path, read_own_yaml, OutputError) if path.exists() else {}


def choose_tracker(name: str) -> str | None:
    """Return 'tensorboard', 'wandb' or None for a recipe's `tracker`; auto is TensorBoard if it is installed.

    Raises RecipeError if the named tracker is not installed.
    """
    if name == "auto":
        return "tensorboard" if find_spec("tensorboard") else None
    if name == "none":
        return None
    if not find_spec(name):
        raise RecipeError(f"--tracker {name} is not installed. Run `pip install {name}`, or use --tracker none.")
    return name


class RunLog:
    """Writes metrics.jsonl, and the same numbers to the tracker. All processes call it.

    done: steps whose lines a resumed run keeps; 0 for a new run, which starts with an empty log. run_values: the run's
    settings, for the tracker.
    """

    def __init__(self, launch: Launch, output: Path, done: int, run_values: Mapping[str, Any]) -> None:
        self._launch = launch
        self._path = output / METRICS
        if launch.is_main:
            kept = metrics_until(output, done or -1)
            with new_file(self._path) as partial:
                partial.write_text("".join(f"{json.dumps(values)}\n" for values in kept), encoding="utf-8")
        if launch.accelerator.log_with:
            (output / LOGS).mkdir(exist_ok=True)
            options = {
                # hides what was logged earlier for steps that run again
                "tensorboard": {"purge_step": done + 1 if done else 0},
                # set WANDB_RUN_ID and WANDB_RESUME to resume the same run in Weights & Biases
                "wandb": {"name": output.name, "dir": str(output / LOGS), "config": dict(run_values)},
            }
            launch.accelerator.init_trackers("ropecli", init_kwargs=options)

    def close(self) -> None:
        for tracker in self._launch.accelerator.trackers:
            tracker.finish()

    def write(self, values: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl and log its numbers; the tracker names perplexities like ppl/256."""
        numbers = {key: value for key, value in values.items() if isinstance(value, int | float) and key != "step"}
        numbers |= {f"ppl/{length}": ppl for length, ppl in values.get("ppl", {}).items()}
        self._launch.accelerator.log(numbers, step=values["step"])
        if self._launch.is_main:
            append_record(self._path, values)


def metrics_until(output: Path, step: int) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl up to `step`."""
    return [values for values in read_records(output / METRICS) if values["step"] <= step]


@dataclass
class TrainingCheckpoints:
    """Saves and restores Accelerate's state. All processes call it together, and fail together.

    keep: number of latest checkpoints to keep.
    """

    launch: Launch
    folder: Path
    keep: int = 1

    def save(self, step: int, best: int | None = None) -> Path:
        """Raises OutputError and keeps the earlier checkpoints if it fails. best: a step to keep besides."""
        path = snapshot_path(self.folder, step)
        unfinished = path.with_name(f"{path.name}.partial")
        failure = (
            self._fault_of(lambda: begin_snapshot(self.folder, step), on_main=True)
            or self._fault_of(lambda: self.launch.accelerator.save_state(str(unfinished)))
            or self._fault_of(lambda: complete_snapshot(unfinished), on_main=True)
        )
        main = self.launch.is_main
        if failure:
            if main:
                shutil.rmtree(unfinished, ignore_errors=True)
            why = failure.replace(str(unfinished), str(path))
            raise OutputError(f"{path} could not be written ({why}). Check the disk space, then use --resume.")
        if main:
            prune_snapshots(self.folder, step, self.keep, best)
        return path

    def restore(self, step: int | None = None) -> int:
        """Restore the checkpoint of a step, by default the newest, and return its step; 0 if there is none.

        Call it after `prepare`. Raises OutputError if it is damaged.
        """
        saved = self.launch.from_main(lambda: list_snapshots(self.folder))
        saved = [each for each in saved if step in (None, each[0])]
        if not saved:
            return 0
        saved_step, path = saved[-1]
        fault = self.launch.from_main(lambda: snapshot_fault(path))
        if fault := fault or self._fault_of(lambda: self.launch.accelerator.load_state(str(path))):
            raise OutputError(
                f"Cannot resume from the checkpoint {path}: {fault}. Delete it to resume from the one before, or to "
                "start over if there is none."
            )
        return saved_step

    def _fault_of(self, action: Callable[[], Any], *, on_main: bool = False) -> str | None:
        """Return the error of the first process that failed, on all processes; None if none failed."""
        from accelerate.utils import gather_object

        failure = None
        try:
            if self.launch.is_main or not on_main:
                with quiet_transformers():
                    action()
        except Exception as error:  # a full disk or a mismatched state raises many types of errors
            failure = reason_of(error)
        self.launch.wait()
        return next(filter(None, gather_object([failure])), None)
