"""A folder's manifest: the size and the sha256 of each of its files, written last, so that it marks a whole folder."""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MANIFEST = "manifest.json"
_PIECE = 2**20


def write_manifest(folder: Path) -> None:
    """Lists all files below `folder`, and has the disk hold them and their names: a power cut tears none of them."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor() as threads:  # hashing leaves Python's lock to others
        digests = list(threads.map(_sha256, files))
        list(threads.map(flush, files))
    listed = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": digest}
        for path, digest in zip(files, digests, strict=True)
    }
    (folder / MANIFEST).write_text(json.dumps(listed, indent=1), encoding="utf-8")
    flush(folder / MANIFEST)
    for path in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        flush(path)


def fault_in(folder: Path, *, digests: bool = True) -> str | None:
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


def flush(path: Path) -> None:
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
