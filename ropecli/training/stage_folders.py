"""The folders of a recipe's stages: where they are, and how the last one becomes OUTPUT (stages.py has the picture)."""

import shutil
import time
from pathlib import Path

from ropecli.atomic import new_file
from ropecli.checkpoint.opening import CONFIG, PROVENANCE
from ropecli.errors import OutputError

STAGES = "stages"
_PATIENCE = 3600.0
"""Seconds that the other processes wait for a patch: without hard links it copies the weights."""


def stage_folder(output: Path, number: int) -> Path:
    return output / STAGES / str(number)


def patched_folder(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-patched")


def wait_for(patched: Path) -> None:
    """Until the first process has written it, by looking at the disk: between stages no process group is there.

    Raises OutputError when it takes too long.
    """
    until = time.monotonic() + _PATIENCE
    while not (patched / CONFIG).is_file():
        if time.monotonic() > until:
            raise OutputError(
                f"{patched} did not appear within {_PATIENCE / 60:.0f} minutes. The first process writes it: --output "
                "must be on a disk that all processes share."
            )
        time.sleep(0.1)


def tidy(folder: Path, *, keep_patched: bool) -> None:
    """Removes what only an unfinished stage needs. keep_patched: it may be the base that an adapter names."""
    from ropecli.training.state import own_folder
    from ropecli.training.writing import clear_finished

    if folder.is_dir():
        with own_folder(folder):  # its lock, if a kill left it there, goes with ours
            clear_finished(folder)
    if not keep_patched:
        shutil.rmtree(patched_folder(folder), ignore_errors=True)


def move_up(folder: Path, output: Path) -> None:
    """Puts the last stage's files into OUTPUT, the two that mark it as finished at the end, and removes its folder.

    A kill at any moment leaves one of both folders finished, and a second call goes on.
    """
    from ropecli.training.state import RUN
    from ropecli.training.writing import finished_step

    marks = (PROVENANCE, CONFIG)
    if finished_step(output) is None:
        try:
            for path in sorted(folder.iterdir()):
                if path.name not in (RUN, *marks) and not path.name.startswith("."):
                    path.replace(output / path.name)
        except OSError as error:
            raise OutputError(f"{output} could not be written: {error.strerror}. --resume tries again.") from error
        for name in marks:
            with new_file(output / name) as partial:
                shutil.copy(folder / name, partial)
    shutil.rmtree(folder, ignore_errors=True)
    if all(path.name.startswith(".") for path in folder.parent.iterdir()):  # what a killed patch left
        shutil.rmtree(folder.parent, ignore_errors=True)
