"""Writes and checks run.yaml, the settings of a run, and locks the run's folder.

OUTPUT/run.yaml        recipe and source; a run resumes only with the same
OUTPUT/metrics.jsonl   a line a step, and one a validation (metrics_log.py)
OUTPUT/checkpoints/    everything needed to resume (training_checkpoints.py); removed when the run is done
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from ropecli.atomic import is_partial, new_file, refuse_existing, sole_use
from ropecli.errors import OutputError, RecipeError, reason_of

RUN = "run.yaml"
_LOCK = ".lock"
_ABSENT = object()
# Other ways to the same files, as the digest shows; and what does not touch the weights.
_MAY_CHANGE = re.compile(
    r"source\.(checkpoint|revision|commit)"
    r"|(recipe\.)?(stages\.\d+\.)?(save_every|keep_checkpoints|tracker|max_loss_rise|eval_.+)"
)


def refuse_foreign(output: Path, resume: bool) -> None:
    """Raises OutputError for a folder that holds anything but a run to be resumed."""
    if output.is_dir() and (output / RUN).exists():
        if not resume:
            raise OutputError(f"{output} holds a run already. Go on with it by --resume, or give another --output.")
    elif not output.is_dir() or [
        path for path in output.iterdir() if path.name != _LOCK and not is_partial(path, output / RUN)
    ]:
        refuse_existing(output)


@contextlib.contextmanager
def lock_output(output: Path) -> Iterator[None]:
    """Locks OUTPUT for this run; a folder that it made and left empty is removed. Raises OutputError."""
    made = not output.exists()
    try:
        with sole_use(output / _LOCK, output):
            yield
    finally:
        if made and output.is_dir() and not any(output.iterdir()):
            output.rmdir()


def begin_run(output: Path, settings: dict[str, Any], resume: bool) -> None:
    """Writes run.yaml, or compares a resumed run's settings with it. Raises OutputError, RecipeError."""
    refuse_foreign(output, resume)  # again, now that no other run can write
    path = output / RUN
    if not path.exists():
        with new_file(path) as partial:
            partial.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
        return
    flat_before, flat_now = _flatten(_read_settings(path)), _flatten(settings)
    keys = [*flat_now, *(key for key in flat_before if key not in flat_now)]
    changed = [key for key in keys if _other(flat_before, flat_now, key) and not _MAY_CHANGE.fullmatch(key)]
    if changed:
        lines = [f"  {key}: {_shown(flat_before, key)} then, {_shown(flat_now, key)} now" for key in changed]
        raise RecipeError(f"{output} was begun with other settings; resume with the same:\n" + "\n".join(lines))


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        return dict(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        raise OutputError(
            f"{path} cannot be read as the settings of a run: {reason_of(error)}. Restore it, or start over with "
            "another --output."
        ) from error


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """By dotted keys; lists of mappings by their numbers."""
    flat = {}
    for key, value in values.items():
        if isinstance(value, list) and any(isinstance(one, dict) for one in value):
            value = dict(enumerate(value))
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _other(before: dict[str, Any], now: dict[str, Any], key: str) -> bool:
    return before.get(key, _ABSENT) != now.get(key, _ABSENT)


def _shown(values: dict[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "absent"
