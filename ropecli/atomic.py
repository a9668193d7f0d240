"""Atomic writes of files and folders: write to a temporary sibling, then rename it."""

import contextlib
import errno
import hashlib
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ropecli.errors import OutputError, RopecliError, quoted, shown

_LONGEST_NAME = 255
"""Bytes of a file name."""


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path. It is renamed to `path` at the end, or removed on any error.

    Follows a link. Raises OutputError for any I/O error.
    """

    def make(prefix: str, folder: Path) -> str:
        handle, name = tempfile.mkstemp(prefix=prefix, dir=folder)
        os.close(handle)
        return name

    with _renamed_to(path, make, 0o666) as partial:
        yield partial


@contextlib.contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Yield a temporary folder. It is renamed to `output` at the end, or removed on any error.

    Follows a link. Raises OutputError for an output that exists and is not empty, and for any I/O error. Messages of
    other errors name `output`, not the temporary folder.
    """
    refuse_existing(output)

    def make(prefix: str, folder: Path) -> str:
        return tempfile.mkdtemp(prefix=prefix, dir=folder)

    with _renamed_to(output, make, 0o777) as partial, naming({partial: output}):
        yield partial


@contextlib.contextmanager
def _renamed_to(path: Path, make: Callable[[str, Path], str], mode: int) -> Iterator[Path]:
    """make: creates the temporary file or folder, from a prefix and the folder that will contain it."""
    target = _followed(path)
    parents: list[Path] = []
    partial = None
    try:
        parents = _make_parents(target)
        _remove_abandoned(target)
        partial = Path(make(f"{_host_prefix(target)}{os.getpid()}-", target.parent))
        yield partial
        partial.chmod(mode & ~_umask())
        partial.replace(target)
    except OSError as error:
        raise OutputError(f"{path} could not be written: {error.strerror or error}") from error
    finally:
        # after the rename there is nothing to remove, and no parent is empty
        if partial:
            _remove(partial)
        _remove_empty(parents)


def as_path(path: str | Path) -> Path:
    """Expand `~`: no shell does it in `--output=~/x`. Raises OutputError for a name that is too long."""
    # Path.expanduser raises for an unknown user
    expanded = Path(os.path.expanduser(path))  # noqa: PTH111
    try:
        expanded.stat()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise OutputError(f"{shown(str(path))} is not a path: {error.strerror}.") from error
    return expanded


def optional_path(path: str | Path | None) -> Path | None:
    return None if path is None else as_path(path)


def sibling(path: Path, suffix: str) -> Path:
    """`path` with `suffix` added to its name. A name that becomes too long ends in a hash instead."""
    name = os.fsencode(path.name)
    if len(name) + len(suffix) <= _LONGEST_NAME:
        return path.with_name(path.name + suffix)
    return path.with_name(f"{_first_bytes(path, 200)}-{hashlib.sha256(name).hexdigest()[:16]}{suffix}")


def is_partial(path: Path, of: Path) -> bool:
    """Return whether `path` is a temporary file of `of`, from this machine or another."""
    return path.name.startswith(_partial_prefix(of))


@contextlib.contextmanager
def sole_use(lock_file: Path, what: Path) -> Iterator[None]:
    """Lock `what` for this run. Raises OutputError if another run holds the lock, or it cannot be written."""
    from filelock import FileLock, Timeout

    parents: list[Path] = []
    try:
        parents = _make_parents(_followed(lock_file))
        lock = FileLock(lock_file, timeout=0)
        lock.acquire()
    except Timeout as error:
        raise OutputError(
            f"{what} is in use by another run. Wait for it to end, or choose another --output."
        ) from error
    except OSError as error:
        raise OutputError(f"{what} could not be written: {error.strerror or error}") from error
    try:
        yield
    finally:
        lock.release()
        lock_file.unlink(missing_ok=True)
        _remove_empty(parents)


@contextlib.contextmanager
def naming(names: Mapping[Path, object]) -> Iterator[None]:
    """Replace temporary paths, the keys of `names`, with their values in the messages of errors raised inside."""
    try:
        yield
    except RopecliError as error:
        message = str(error)
        for temporary, name in names.items():
            message = message.replace(str(temporary), str(name))
        raise type(error)(message) from error


def refuse_unwritable(path: Path | None) -> None:
    """Raise OutputError if the file cannot be written. Called before a long run."""
    if path is None:
        return
    _refuse_place(path)
    with _as_output_error(path):
        is_folder = path.is_dir()
    if is_folder:
        raise OutputError(f"{path} could not be written: it is a folder.")


def refuse_existing(output: Path) -> None:
    """Raise OutputError if the folder exists and is not empty, or cannot be created."""
    with _as_output_error(output):
        taken = output.exists() and (not output.is_dir() or any(output.iterdir()))
        fixed = output.is_dir() and (output.samefile(Path.cwd()) or os.path.ismount(_followed(output)))
    if taken:
        raise OutputError(f"{output} exists and is not empty. Choose another --output, or delete it first.")
    if fixed:
        raise OutputError(
            f"{output} is the current folder or a mount point and cannot be replaced. Choose a folder inside it: "
            f"--output {quoted(output / 'checkpoint')}"
        )
    _refuse_place(output)


def _refuse_place(path: Path) -> None:
    """Raise OutputError if no file can be created in the nearest existing parent folder."""
    with _as_output_error(path):
        folder = next(parent for parent in _followed(path).parents if parent.exists())
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OutputError(
            f"{path} could not be written: {folder} is not a writable folder ({error.strerror})."
        ) from error


@contextlib.contextmanager
def _as_output_error(path: Path) -> Iterator[None]:
    """Raise OutputError if the path cannot be examined (e.g. its name is too long)."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{str(path)[:80]} cannot be written: {error.strerror}") from error


def _make_parents(output: Path) -> list[Path]:
    """Create the missing parent folders and return them, outermost first."""
    missing = []
    for parent in output.parents:
        if parent.exists():
            break
        missing.append(parent)
    output.parent.mkdir(parents=True, exist_ok=True)
    return missing[::-1]


def _remove_empty(parents: list[Path]) -> None:
    for parent in reversed(parents):
        with contextlib.suppress(OSError):
            parent.rmdir()


def _followed(path: Path) -> Path:
    """The absolute path with all links resolved; broken links give the path they point to."""
    return Path(os.path.realpath(path))


def _partial_prefix(output: Path) -> str:
    return f".{_first_bytes(output, 100)}.partial-"


def _first_bytes(path: Path, most: int) -> str:
    """The beginning of the file's name, without half a character."""
    return os.fsencode(path.name)[:most].decode(errors="ignore")


def _host_prefix(output: Path) -> str:
    # containers that share a disk do not share process ids, so the host's name is part of the prefix
    return f"{_partial_prefix(output)}{platform.node()[:32]}-"


def _remove_abandoned(output: Path) -> None:
    """Remove what killed runs on this host left next to `output`."""
    prefix = _host_prefix(output)
    for partial in output.parent.iterdir():
        process = re.fullmatch(re.escape(prefix) + r"(\d{1,9})-\w+", partial.name)
        if process and not _is_running(int(process[1])):
            _remove(partial)


def _remove(path: Path) -> None:
    """Remove a file or folder, unless it is another user's."""
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.unlink()


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
