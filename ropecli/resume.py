"""Saves and restores the progress of a run. One mechanism serves `extend`, evaluation and training.

Request    settings of the run; only the same request can resume it
Records    JSON lines; one that a killed run left incomplete is skipped
Snapshots  folders named by step, written atomically and checked against a list of files and sizes

OUTPUT.state/            state of an evaluation or of `extend`, removed once its output is written
    request              the request, as one record
    .lock-0              lock held by the first process
    samples-0.jsonl      records of the first process
OUTPUT/checkpoints/      snapshots of a training run; its request is OUTPUT/run.yaml
    000040/              snapshot after 40 steps; 000040.partial is left by a killed run
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ropecli.atomic import new_file, sole_use
from ropecli.errors import OutputError, RecipeError, reason_of, shown

_REQUEST, _FILES = "request", "files.json"
_ABSENT = object()


# Request


def refuse_other_request(
    before: Mapping[str, Any], now: Mapping[str, Any], state: Path, may_change: str | None = None
) -> None:
    """Raise RecipeError, listing the keys that differ. may_change: a pattern of dotted keys that may differ."""
    old, new = _flatten(before), _flatten(now)
    keys = [*new, *(key for key in old if key not in new)]
    changed = [key for key in keys if old.get(key, _ABSENT) != new.get(key, _ABSENT)]
    if may_change:
        changed = [key for key in changed if not re.fullmatch(may_change, key)]
    if changed:
        then, now = (
            {key: shown(values[key]) if key in values else "absent" for key in changed} for values in (old, new)
        )
        lines = [f"  {key}: {then[key]} then, {now[key]} now" for key in changed]
        raise RecipeError(
            f"{state} belongs to a run with other settings. Resume it with the same settings, or delete it to start "
            "over:\n" + "\n".join(lines)
        )


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten to dotted keys; lists of mappings are keyed by index."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            value = dict(enumerate(value))
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


# Records


def read_records(path: Path) -> list[Any]:
    """Values of the complete lines; empty if the file does not exist. Raises OSError."""
    values = []
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        with contextlib.suppress(ValueError):
            values.append(json.loads(line))
    return values


def append_record(path: Path, value: Any) -> None:
    """Append one record. Raises ValueError for a number that is not finite, OSError."""
    text = json.dumps(value, allow_nan=False).encode()
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # a truncated line must not damage the next
                file.write(b"\n")
        file.write(text + b"\n")


# The folder OUTPUT.state


def state_folder(output: Path) -> Path:
    return output.with_name(f"{output.name}.state")


def refuse_interrupted(output: Path | None, resume: bool) -> None:
    """Raise OutputError if `resume` is false and OUTPUT.state exists, or `resume` is true without an output."""
    if output is None:
        if resume:
            raise OutputError("--resume needs --output, the output of the run to resume.")
    elif not resume and (state_folder(output) / _REQUEST).exists():
        raise OutputError(
            f"{state_folder(output)} belongs to a run that was interrupted or is still running. Continue with "
            "--resume, or delete it to start over."
        )


@contextlib.contextmanager
def open_state(output: Path, request: Mapping[str, Any], rank: int = 0) -> Iterator[Path]:
    """Open or create OUTPUT.state, with the progress of an earlier run of the same request. Removed without a result.

    rank: this process's rank; every process holds its own lock. Raises RecipeError for another request; OutputError if
    another run uses the folder, or it holds files but no request; OSError.
    """
    folder, request = state_folder(output), json.loads(json.dumps(request))
    lock = folder / f".lock-{rank}"
    with sole_use(lock, folder):
        has_files = any(not path.name.startswith(".") for path in folder.iterdir())
        requests = read_records(folder / _REQUEST)
        for before in requests:
            refuse_other_request(before, request, folder)
        if not requests:
            if has_files:
                raise OutputError(
                    f"{folder} is not the state of a run, or its file {_REQUEST!r} is damaged. Delete it to start "
                    "over, or choose another --output."
                )
            with new_file(folder / _REQUEST) as partial:
                append_record(partial, request)
        try:
            yield folder
        finally:
            with contextlib.suppress(OSError):  # the first process may have removed it
                if {*folder.iterdir()} == {folder / _REQUEST, lock}:
                    (folder / _REQUEST).unlink()


def remove_state(output: Path | None) -> None:
    """Remove OUTPUT.state. Called once the output is written."""
    if output and read_records(state_folder(output) / _REQUEST):
        shutil.rmtree(state_folder(output), ignore_errors=True)


# Snapshots


def list_snapshots(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of every folder named like a snapshot, damaged ones included; newest last."""
    return sorted((int(path.name), path) for path in folder.glob("*") if path.name.isdecimal())


def snapshot_path(folder: Path, step: int) -> Path:
    return folder / f"{step:06}"


def begin_snapshot(folder: Path, step: int) -> Path:
    """Create an empty folder to fill; complete_snapshot renames it. Raises OSError."""
    partial = folder / f"{step:06}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def complete_snapshot(partial: Path) -> None:
    """List the folder's files, flush it to disk and rename it, replacing a snapshot of that step. Raises OSError."""
    snapshot = partial.with_suffix("")
    sizes = {str(path.relative_to(partial)): path.stat().st_size for path in partial.rglob("*") if path.is_file()}
    (partial / _FILES).write_text(json.dumps(sizes, indent=1), encoding="utf-8")
    for path in [*partial.rglob("*"), partial]:  # so that they survive a power cut
        _fsync(path)
    shutil.rmtree(snapshot, ignore_errors=True)
    partial.rename(snapshot)
    _fsync(snapshot.parent)


def snapshot_fault(snapshot: Path) -> str | None:
    """A file that is missing, or has another size than when it was saved; None if all are whole."""
    try:
        for name, size in json.loads((snapshot / _FILES).read_text(encoding="utf-8")).items():
            if not (snapshot / name).is_file() or (snapshot / name).stat().st_size != size:
                return f"{name} is missing or incomplete"
    except (OSError, ValueError) as error:
        return f"{_FILES} cannot be read ({reason_of(error)})"
    return None


def prune_snapshots(folder: Path, newest: int, keep: int, best: int | None = None) -> None:
    """Remove all snapshots except the last `keep` up to step `newest`, and that of step `best`."""
    earlier = [step for step, _ in list_snapshots(folder) if step <= newest]
    kept = {snapshot_path(folder, step) for step in (*earlier[-keep:], best) if step is not None}
    for path in folder.iterdir():
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def _fsync(path: Path) -> None:
    """Flush a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
