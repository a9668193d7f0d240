"""Whole-or-nothing writes: a file or folder is written as a hidden sibling, which is renamed at the end."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile
from uuid import uuid4

from ropecli.errors import OutputError, RopecliError, quoted


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path. It is renamed to `path` at the end, or removed on any error.

    Follows a link. Raises OSError.
    """
    target = path.resolve()
    partial = target.with_name(f".{uuid4().hex}.partial")
    with _parents_of(target):
        try:
            yield partial
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Yield a temporary folder. It is renamed to `output` at the end, or removed on any error.

    What a killed run left is replaced. Follows a link. Raises OSError, and OutputError for an output that exists and is
    not empty, or that another run writes. Messages of other errors name `output`, not the temporary folder.
    """
    refuse_existing(output)
    target = output.resolve()
    lock, partial = (target.with_name(f".{target.name}.{ending}") for ending in ("lock", "partial"))
    with sole_use(lock, output), naming(partial, output):
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            yield partial
            partial.replace(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def as_path(path: str | Path) -> Path:
    """Expand `~`: no shell does it in `--output=~/x`."""
    # Path.expanduser raises for an unknown user
    return Path(os.path.expanduser(path))  # noqa: PTH111


def optional_path(path: str | Path | None) -> Path | None:
    return None if path is None else as_path(path)


@contextlib.contextmanager
def sole_use(lock_file: Path, what: Path) -> Iterator[None]:
    """Lock `what` for this run. Raises OSError, and OutputError if another run holds the lock."""
    from filelock import FileLock, Timeout

    with _parents_of(lock_file.resolve()):
        lock = FileLock(lock_file, timeout=0)
        try:
            lock.acquire()
        except Timeout as error:
            raise OutputError(
                f"{what} is in use by another run. Wait for it to end, or choose another --output."
            ) from error
        try:
            yield
        finally:
            lock.release()
            lock_file.unlink(missing_ok=True)


@contextlib.contextmanager
def naming(temporary: Path, name: object) -> Iterator[None]:
    """Replace a temporary path with this name in the messages of errors raised inside."""
    try:
        yield
    except RopecliError as error:
        raise type(error)(str(error).replace(str(temporary), str(name))) from error


def refuse_unwritable(*files: Path | None, overwrite: bool = False) -> None:
    """Raise OutputError for a file that cannot be written, or exists. Called before a long run.

    overwrite: whether existing files may be replaced. Empty ones always may.
    """
    for path in filter(None, files):
        _refuse_place(path)
        if path.exists() and not path.is_file():
            raise OutputError(f"{path} could not be written: it exists and is not a file.")
        if path.exists() and path.stat().st_size and not overwrite:
            raise OutputError(f"{path} exists. Choose another name, or replace it with --overwrite.")


def refuse_existing(output: Path) -> None:
    """Raise OutputError if the folder exists and is not empty, or cannot be created."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise OutputError(f"{output} exists and is not empty. Choose another --output, or delete it first.")
    if output.is_dir() and (output.samefile(Path.cwd()) or output.resolve().is_mount()):
        raise OutputError(
            f"{output} is the current folder or a mount point and cannot be replaced. Choose a folder inside it: "
            f"--output {quoted(output / 'checkpoint')}"
        )
    _refuse_place(output)


def folder_to_write(output: str | Path | None, *, dry_run: bool) -> Path | None:
    """The new folder, None for a dry run. Raises OutputError without an output, and for one that exists."""
    if dry_run:
        return None
    if output is None:
        raise OutputError("Set --output DIR, the folder to write, or --dry-run.")
    refuse_existing(folder := as_path(output))
    return folder


def _refuse_place(path: Path) -> None:
    """Raise OutputError if no file can be created in the nearest existing parent folder."""
    folder = next(parent for parent in path.resolve().parents if parent.exists())
    try:
        with TemporaryFile(dir=folder):  # root may write everywhere by its permissions, and not in /proc
            pass
    except OSError as error:
        raise OutputError(f"{path} could not be written: {folder} is not a writable folder.") from error


@contextlib.contextmanager
def _parents_of(path: Path) -> Iterator[None]:
    """Create the missing parent folders; at the end remove those of them that are empty."""
    missing = [parent for parent in path.parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            for parent in missing:
                parent.rmdir()
