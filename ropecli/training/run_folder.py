"""The folder of a training run: its settings, its metrics, and the checkpoints that it resumes from.

OUTPUT/run.yaml              recipe and source; a run resumes only with the same
OUTPUT/metrics.jsonl         a line a step, and one a validation
OUTPUT/logs/                 the same numbers for TensorBoard or Weights & Biases, through Accelerate
OUTPUT/checkpoints/000040/   after 40 steps: what Accelerate saves (ropecli/resume.py); removed when the run is done
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import yaml

from ropecli.atomic import is_partial, new_file, refuse_existing, sole_use
from ropecli.errors import OutputError, RecipeError, reason_of
from ropecli.live.stock_transformers import quiet_transformers
from ropecli.resume import (
    begin_snapshot,
    complete_snapshot,
    list_snapshots,
    manifest_fault,
    prune_snapshots,
    refuse_other_request,
    restore_newest,
    snapshot_path,
)

RUN = "run.yaml"
CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"
LOGS = "logs"
_PROJECT = "ropecli"
T = TypeVar("T")
LOCK = ".lock"
# Other ways to the same files, as the digest shows; and what does not touch the weights.
_MAY_CHANGE = (
    r"source\.(checkpoint|revision|commit)"
    r"|(recipe\.)?(stages\.\d+\.)?(save_every|keep_checkpoints|tracker|max_loss_rise|eval_.+)"
)


def refuse_foreign(output: Path, resume: bool) -> None:
    """Raises OutputError for a folder that holds anything but a run to be resumed."""
    if output.is_dir() and (output / RUN).exists():
        if not resume:
            raise OutputError(f"{output} holds a run already. Continue it by --resume, or give another --output.")
    elif not output.is_dir() or [
        path for path in output.iterdir() if path.name != LOCK and not is_partial(path, output / RUN)
    ]:
        refuse_existing(output)


def lock_output(output: Path) -> contextlib.AbstractContextManager[None]:
    """Lock OUTPUT for this run; a folder that it made and left empty is removed. Raises OutputError."""
    return sole_use(output / LOCK, output)


def begin_run(output: Path, settings: dict[str, Any], resume: bool) -> None:
    """Write run.yaml, or compare a resumed run's settings with it. Raises OutputError, RecipeError."""
    refuse_foreign(output, resume)  # again, now that no other run can write
    path = output / RUN
    if path.exists():
        before = yaml.safe_load(path.read_text(encoding="utf-8"))
        refuse_other_request(before, settings, output, _MAY_CHANGE)
        return
    with new_file(path) as partial:
        partial.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")


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
    """metrics.jsonl and the tracker, which gets the same numbers. All processes write to it alike.

    done: steps that a resumed run keeps; None for one that starts, where the log is cut back to nothing. run_values:
    the run's settings, for the tracker.
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
        """Flush the tracker."""
        for tracker in self._accelerator.trackers:
            tracker.finish()

    def write(self, values: dict[str, Any]) -> None:
        """Write a line of metrics.jsonl; in the tracker, perplexities have names like ppl/256."""
        numbers = {key: value for key, value in values.items() if isinstance(value, int | float) and key != "step"}
        numbers |= {f"ppl/{length}": ppl for length, ppl in values.get("ppl", {}).items()}
        self._accelerator.log(numbers, step=values["step"])
        if not self._accelerator.is_main_process:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(values) + "\n")
        except OSError as error:
            raise OutputError(f"{self._path} could not be written: {error.strerror}. Continue by --resume.") from error


def metrics_until(output: Path, step: int) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl up to `step`, without the one that a kill has cut short."""
    path = output / METRICS
    if not path.exists():
        return []
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            kept.append(json.loads(line))
    return [values for values in kept if values["step"] <= step]


def losses_until(output: Path, step: int) -> dict[int, float]:
    """The losses in metrics.jsonl by step, up to `step`. Lines of a validation have none."""
    return {values["step"]: values["loss"] for values in metrics_until(output, step) if "loss" in values}


def from_main(accelerator: Any, answer: Callable[[], T]) -> T:
    """The main process's answer, in all processes."""
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([answer() if accelerator.is_main_process else None])[0]


@dataclass
class Checkpoints:
    """Saves and restores the state that Accelerate holds. All processes call it together, and fail together.

    every: steps between two. keep: how many of the last. spare: given the steps of all checkpoints, names one more to
    keep.
    """

    accelerator: Any
    folder: Path
    every: int
    keep: int = 1
    spare: Callable[[list[int]], int | None] = lambda steps: None
    say: Callable[[str], None] = lambda message: None

    def save(self, step: int) -> None:
        """Raises OutputError, and leaves the earlier checkpoints as they are."""
        whole = snapshot_path(self.folder, step)
        partial = whole.with_name(f"{whole.name}.partial")

        def write() -> None:
            with quiet_transformers():
                self.accelerator.save_state(str(partial))

        failure = (
            self._fault_of(lambda: begin_snapshot(self.folder, step), on_main=True)
            or self._fault_of(write)
            or self._fault_of(lambda: complete_snapshot(partial), on_main=True)
        )
        main = self.accelerator.is_main_process
        if failure:
            if main:
                shutil.rmtree(partial, ignore_errors=True)
            why = failure.replace(str(partial), str(whole))
            raise OutputError(f"{whole} could not be written; is the disk full? ({why}) Continue by --resume.")
        if main:
            self.say(f"Saved {whole}.")
            spared = self.spare([saved for saved, _ in list_snapshots(self.folder) if saved <= step])
            prune_snapshots(self.folder, step, self.keep, [] if spared is None else [spared])

    def restore(self, say: Callable[[str], None] = lambda message: None) -> int:
        """Restore the newest sound checkpoint and return its step; 0 where there is none. To be called after `prepare`.

        say: warned of damaged ones. Raises OutputError where all are damaged.
        """

        def load(path: Path) -> None:
            with quiet_transformers():
                self.accelerator.load_state(str(path))

        def fault_of(path: Path) -> str | None:
            return from_main(self.accelerator, lambda: manifest_fault(path)) or self._fault_of(lambda: load(path))

        return restore_newest(from_main(self.accelerator, lambda: list_snapshots(self.folder)), fault_of, say)

    def _fault_of(self, action: Callable[[], Any], *, on_main: bool = False) -> str | None:
        """The error of the first process that failed, in all processes; None where none did."""
        from accelerate.utils import gather_object

        failure = None
        try:
            if self.accelerator.is_main_process or not on_main:
                action()
        except Exception as error:  # a full disk, or a state that does not fit, shows in many kinds
            failure = reason_of(error)
        return next(filter(None, gather_object([failure])), None)
