"""What tests of the commands share."""

import contextlib
import os
import shutil
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def contents():
    """contents(folder) -> every file below it with its bytes, and every folder."""

    def read(folder: Path) -> dict[str, object]:
        return {
            str(path.relative_to(folder)): path.read_bytes() if path.is_file() else stat.S_IFMT(path.lstat().st_mode)
            for path in sorted(folder.rglob("*"))
        }

    return read


@pytest.fixture
def source(llama, tmp_path) -> Path:
    """A copy of the checkpoint, for tests that look at what becomes of it."""
    return Path(shutil.copytree(llama, tmp_path / "source"))


@pytest.fixture
def stopping(monkeypatch):
    """with stopping(after, number): a signal comes when so many documents are measured; Ctrl-C, or the given one."""
    from ropecli.evaluation.saved_progress import EvalProgress

    @contextlib.contextmanager
    def stop(after: int, number: int = signal.SIGINT) -> Iterator[None]:
        add = EvalProgress.add

        def adding(self, *values):
            add(self, *values)
            nonlocal after
            after -= 1
            if not after:
                os.kill(os.getpid(), number)

        with monkeypatch.context() as patch:
            patch.setattr(EvalProgress, "add", adding)
            yield

    return stop
