"""A run's folder: what was asked, how far it came, and checkpoints that are there whole or not at all.

OUTPUT/run.yaml          recipe and source; a run is resumed only with the same
OUTPUT/metrics.jsonl     a line a step
OUTPUT/checkpoints/N/    everything needed to go on after step N; removed when the run is done
"""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError

from ropecli.atomic import new_file, partial_file, refuse_existing, sole_use
from ropecli.checkpoint.quiet import quiet_transformers
from ropecli.errors import OutputError, RecipeError, reason_of

RUN = "run.yaml"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
_LOCK = ".lock"
# other ways to the same files, as the digest shows
_MAY_CHANGE = {"source.checkpoint", "source.revision", "source.commit"}


def refuse_foreign(output: Path, resume: bool) -> None:
    """Raises OutputError for a folder that holds anything but a run to be resumed."""
    if output.is_dir() and (output / RUN).exists():
        if not resume:
            raise OutputError(f"{output} holds a run already. Go on with it by --resume, or give another --output.")
    elif not output.is_dir() or [
        path for path in output.iterdir() if path.name not in (_LOCK, partial_file(output / RUN).name)
    ]:
        refuse_existing(output)


@contextlib.contextmanager
def own_folder(output: Path) -> Iterator[None]:
    """Holds OUTPUT for this run; a folder that it made and left empty is removed. Raises OutputError."""
    made = not output.exists()
    try:
        with sole_use(output / _LOCK, output):
            yield
    finally:
        if made and output.is_dir() and not any(output.iterdir()):
            output.rmdir()


def begin(output: Path, asked: dict[str, Any], resume: bool) -> None:
    """Writes run.yaml, or holds a resumed run against the one that is there. Raises OutputError, RecipeError."""
    refuse_foreign(output, resume)  # again, now that no other run can write
    path = output / RUN
    if not path.exists():
        _write_text(path, yaml.safe_dump(asked, sort_keys=False))
        return
    try:
        flat_before = _flatten(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        raise OutputError(f"{path} cannot be read ({error}); the run cannot be resumed.") from error
    flat_now = _flatten(asked)
    changed = [key for key in flat_now if flat_before.get(key) != flat_now[key] and key not in _MAY_CHANGE]
    if changed:
        lines = [f"  {key}: {flat_before.get(key)!r} then, {flat_now[key]!r} now" for key in changed]
        raise RecipeError(f"{output} was begun with other settings; resume with the same:\n" + "\n".join(lines))


def last_checkpoint(output: Path) -> tuple[int, Path] | None:
    """(step, folder) of the newest whole checkpoint."""
    found = [path for path in (output / CHECKPOINTS).glob("*") if path.name.isdigit()]
    newest = max(found, key=lambda path: int(path.name), default=None)
    return (int(newest.name), newest) if newest else None


def save_checkpoint(accelerator, output: Path, step: int, keep: int) -> None:
    """Saves model, optimizer and random state after `step`, and drops all but the last `keep` checkpoints."""
    folder = output / CHECKPOINTS
    partial = folder / f"{step}.partial"
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
    accelerator.wait_for_everyone()
    try:
        with quiet_transformers():
            accelerator.save_state(str(partial))
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk shows as any of these
        shutil.rmtree(partial, ignore_errors=True)
        raise OutputError(
            f"{partial} could not be written; is the disk full? ({reason_of(error)}) --resume goes on."
        ) from error
    accelerator.wait_for_everyone()
    if not accelerator.is_main_process:
        return
    shutil.rmtree(folder / str(step), ignore_errors=True)
    partial.rename(folder / str(step))
    whole = sorted((path for path in folder.glob("*") if path.name.isdigit()), key=lambda path: int(path.name))
    for path in [*whole[:-keep], *folder.glob("*.partial")]:
        shutil.rmtree(path, ignore_errors=True)


class MetricsLog:
    """metrics.jsonl, cut back to the step that a resumed run goes on from."""

    def __init__(self, output: Path, step: int) -> None:
        self._path = output / METRICS
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        kept = [line for line in lines if _step_of(line) <= step]
        _write_text(self._path, "".join(f"{line}\n" for line in kept))

    def write(self, values: dict[str, Any]) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(values) + "\n")
        except OSError as error:
            raise OutputError(f"{self._path} could not be written: {error.strerror}. --resume goes on.") from error


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):  # the line that a kill cut short
        return float("inf")


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _write_text(path: Path, text: str) -> None:
    with new_file(path) as partial:
        partial.write_text(text, encoding="utf-8")
