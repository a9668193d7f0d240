"""Saves and restores training checkpoints: whole or not at all, and checked against a manifest before they are used.

OUTPUT/checkpoints/000040/        after 40 steps: what Accelerate saves, and manifest.json (size, sha256) of these files
OUTPUT/checkpoints/000040-003/    and after 3 passes of the step that follows: also each process's gradients
.../000040.partial/               being written, or left by a kill
.../000040.damaged/               skipped by a run that resumed from an earlier one
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ropecli.errors import OutputError, reason_of
from ropecli.live.stock_transformers import quiet_transformers
from ropecli.training.output.metrics_log import METRICS

CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
T = TypeVar("T")
_NAME = re.compile(r"(\d+)(?:-(\d+))?")
_GRADIENTS = "gradients_{}.safetensors"  # by process, as Accelerate numbers its random_states_{}.pkl
_LOSS = "loss"
_PIECE = 2**20


@dataclass(frozen=True, order=True)
class ResumePoint:
    """Where a run resumes. step: finished updates. passes: finished passes of the step that follows."""

    step: int
    passes: int = 0

    @property
    def name(self) -> str:
        return f"{self.step:06}" + (f"-{self.passes:03}" if self.passes else "")

    def __str__(self) -> str:
        return f"step {self.step}" + (f", pass {self.passes}" if self.passes else "")


def save_checkpoint(
    accelerator,
    wrapped: torch.nn.Module,
    output: Path,
    point: ResumePoint,
    keep: int,
    *,
    loss: float = 0.0,
    spare: Callable[[list[int]], int | None] = lambda steps: None,
) -> None:
    """Saves all that is needed to go on at `point`, then removes all but the last `keep` checkpoints.

    To be called by all processes at once. loss: of the finished passes of a step, summed, each process's own. With
    point.passes > 0 the parameters' gradients are saved too, so each process must hold them whole (one process, or
    plain data parallelism). spare: given the steps that there are checkpoints of, names one to be kept beside the last.
    Raises OutputError, in all processes, and leaves the earlier checkpoints as they are.
    """
    folder = output / CHECKPOINTS
    whole, partial = folder / point.name, folder / f"{point.name}.partial"
    main = accelerator.is_main_process
    # asked to stop as soon as it was resumed
    if _from_main(accelerator, lambda: whole.exists() and manifest_fault(whole) is None):
        return

    def write() -> None:
        with quiet_transformers():
            accelerator.save_state(str(partial))
        if point.passes:
            _save_gradients(accelerator, wrapped, partial, loss)

    def complete() -> None:
        write_manifest(partial)
        fsync(output / METRICS)  # the lines of the steps that are not made again
        shutil.rmtree(whole, ignore_errors=True)  # a damaged one: see above
        partial.rename(whole)
        fsync(folder)

    kinds = (OSError, RuntimeError, SafetensorError)  # a full disk shows as any of these
    _, failure = _on_all_processes(accelerator, lambda: _make_empty(partial) if main else None, kinds)
    if not failure:
        _, failure = _on_all_processes(accelerator, write, kinds)
    if not failure:
        _, failure = _on_all_processes(accelerator, lambda: complete() if main else None, kinds)
    if failure:
        if main:
            shutil.rmtree(partial, ignore_errors=True)
        why = failure.replace(str(partial), str(whole))
        raise OutputError(f"{whole} could not be written; is the disk full? ({why}) --resume goes on.")
    if main:
        _prune(folder, point, keep, spare)


def restore_newest(
    accelerator, wrapped: torch.nn.Module, output: Path, say: Callable[[str], None]
) -> tuple[ResumePoint, float]:
    """Puts the newest whole checkpoint back; gives where it stands, and the `loss` that it was saved with.

    To be called by all processes at once, after `prepare`. A damaged checkpoint, or one that cannot be loaded, is
    left out with a warning for the one before. ResumePoint(0) where there is none. Raises OutputError where none of
    them can be used.
    """
    folder = output / CHECKPOINTS
    left_out: list[tuple[Path, str]] = []
    for point, path in _from_main(accelerator, lambda: sorted(list_checkpoints(folder), reverse=True)):
        loss, fault = _restore(accelerator, wrapped, path, point)
        if not fault:
            if accelerator.is_main_process:
                _mark_damaged(path for path, _ in left_out)
            return point, loss or 0.0
        say(f"warning: the checkpoint {path} is damaged and left out: {fault}.")
        left_out.append((path, fault))
    if left_out:
        faults = "\n".join(f"  {path.name}: {fault}" for path, fault in left_out)
        raise OutputError(
            f"No checkpoint in {folder} can be used:\n{faults}\n"
            f"Put a sound copy back, or begin anew: with another --output, or after removing {output}."
        )
    return ResumePoint(0), 0.0


def list_checkpoints(folder: Path) -> list[tuple[ResumePoint, Path]]:
    """All that are named as checkpoints, whole or not."""
    names = ((path, _NAME.fullmatch(path.name)) for path in folder.glob("*"))
    return [(ResumePoint(int(name[1]), int(name[2] or 0)), path) for path, name in names if name]


def _restore(accelerator, wrapped: torch.nn.Module, path: Path, point: ResumePoint) -> tuple[float | None, str | None]:
    """The loss, or what is wrong. What a loading that fails leaves half done, the next one overwrites as a whole."""
    if fault := _from_main(accelerator, lambda: manifest_fault(path)):
        return None, fault
    return _on_all_processes(accelerator, lambda: _load(accelerator, wrapped, path, point), (Exception,))


def _load(accelerator, wrapped: torch.nn.Module, path: Path, point: ResumePoint) -> float:
    wrapped.zero_grad()  # of a loading that failed
    with quiet_transformers():
        accelerator.load_state(str(path))
    _check_random_state(accelerator, path)
    accelerator.step = point.passes  # by which `accumulate` knows a step's last pass
    return _load_gradients(accelerator, wrapped, path) if point.passes else 0.0


def _check_random_state(accelerator, path: Path) -> None:
    """Accelerate passes in silence over a random state that it could not put back. Raises RuntimeError."""
    from accelerate.utils import RNG_STATE_NAME, load

    states = load(path / f"{RNG_STATE_NAME}_{accelerator.process_index}.pkl")
    pairs = [(states["torch_manual_seed"], torch.get_rng_state())]
    if accelerator.device.type == "cuda":
        device = torch.cuda.current_device()
        pairs.append((states["torch_cuda_manual_seed"][device], torch.cuda.get_rng_state(device)))
    if not all(torch.equal(saved.cpu(), now.cpu()) for saved, now in pairs):
        raise RuntimeError("the state of the random numbers could not be put back")


def _save_gradients(accelerator, wrapped: torch.nn.Module, folder: Path, loss: float) -> None:
    gradients = {
        name: parameter.grad.detach().cpu().contiguous()
        for name, parameter in accelerator.unwrap_model(wrapped).named_parameters()
        if parameter.grad is not None
    }
    save_file(gradients, folder / _GRADIENTS.format(accelerator.process_index), {_LOSS: float(loss).hex()})


def _load_gradients(accelerator, wrapped: torch.nn.Module, folder: Path) -> float:
    parameters = dict(accelerator.unwrap_model(wrapped).named_parameters())
    with safe_open(folder / _GRADIENTS.format(accelerator.process_index), "pt") as file:
        names = file.keys()
        if unknown := [name for name in names if name not in parameters]:
            raise RuntimeError(f"it has a gradient of {unknown[0]}, which the model has not")
        for name in names:
            # in the parameter's own memory order, as autograd lays gradients out: sums over them keep their bits
            parameters[name].grad = torch.empty_like(parameters[name]).copy_(file.get_tensor(name))
        return float.fromhex(file.metadata()[_LOSS])


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _prune(folder: Path, newest: ResumePoint, keep: int, spare: Callable[[list[int]], int | None]) -> None:
    """Leaves the last `keep` that look whole: their digests were held against the files when they were written."""
    sound = sorted(
        (point, path)
        for point, path in list_checkpoints(folder)
        if point <= newest and not manifest_fault(path, digests=False)
    )
    spared = spare([point.step for point, _ in sound])
    kept = {path for _, path in sound[-keep:]} | {path for point, path in sound if point.step == spared}
    for path in folder.iterdir():
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def _mark_damaged(damaged: Iterable[Path]) -> None:
    """So that they are not counted among those to keep; the next saving removes them."""
    for path in damaged:
        aside = path.with_name(f"{path.name}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)


def _from_main(accelerator, answer: Callable[[], Any]) -> Any:
    """What the main process finds, in all processes."""
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([answer() if accelerator.is_main_process else None])[0]


def _on_all_processes(
    accelerator, action: Callable[[], T], kinds: tuple[type[Exception], ...]
) -> tuple[T | None, str | None]:
    """Each process's own result, and what went wrong in the first one that failed: all take the same way from here."""
    from accelerate.utils import gather_object

    result, failure = None, None
    try:
        result = action()
    except kinds as error:
        failure = reason_of(error)
    return result, next(filter(None, gather_object([failure])), None)


def write_manifest(folder: Path) -> None:
    """Lists all files below `folder`, and has the disk hold them and their names: a power cut tears none of them."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor() as threads:  # hashing leaves Python's lock to others
        digests = list(threads.map(_sha256, files))
        list(threads.map(fsync, files))
    listed = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": digest}
        for path, digest in zip(files, digests, strict=True)
    }
    (folder / MANIFEST).write_text(json.dumps(listed, indent=1), encoding="utf-8")
    fsync(folder / MANIFEST)
    for path in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        fsync(path)


def manifest_fault(folder: Path, *, digests: bool = True) -> str | None:
    """In which way the files are not those of the manifest; None where all is well. Files it does not name are ignored.

    digests: also read all files, and not only look at their sizes.
    """
    try:
        listed = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        sizes = {folder / name: file["size"] for name, file in listed.items()}
        sha256 = {folder / name: file["sha256"] for name, file in listed.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"its {MANIFEST} is missing or cannot be read"
    if not listed:
        return f"its {MANIFEST} names no file"
    for path, size in sizes.items():
        if not path.is_file():
            return f"{path.relative_to(folder)} is missing"
        if path.stat().st_size != size:
            return f"{path.relative_to(folder)} has {path.stat().st_size} bytes, not {size}"
    if not digests:
        return None
    try:
        with ThreadPoolExecutor() as threads:
            for path, digest in zip(sha256, threads.map(_sha256, sha256), strict=True):
                if digest != sha256[path]:
                    return f"{path.relative_to(folder)} has other bytes than were written"
    except OSError as error:
        return f"a file cannot be read: {error.strerror}"
    return None


def fsync(path: Path) -> None:
    """Has the disk hold what was written to a file, or which names a folder has; where there is nothing, nothing."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except (FileNotFoundError, PermissionError):  # Windows opens no folders
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            sha.update(piece)
    return sha.hexdigest()
