"""What tests of the commands share."""

import contextlib
import json
import os
import shutil
import signal
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import MAIN, NAME, OLD, FakeHub, Repository, bytes_of


@pytest.fixture(scope="session")
def contents():
    """contents(folder) -> every file below it with its bytes, and every folder."""

    def read(folder: Path) -> dict[str, object]:
        return {
            str(path.relative_to(folder)): path.read_bytes() if path.is_file() else stat.S_IFMT(path.lstat().st_mode)
            for path in sorted(folder.rglob("*"))
        }

    return read


@pytest.fixture(scope="module")
def yarn(llama, tmp_path_factory):
    """The tiny Llama patched with yarn ×4: it reads 256 tokens."""
    import ropecli

    folder = tmp_path_factory.mktemp("patched") / "it's yarn"  # a shell must be told where the name ends
    ropecli.patch(llama, method="yarn", factor=4, output=folder, no_verify=True)
    return folder


@pytest.fixture
def evaluate(ropecli, llama, corpus):
    """evaluate(option, ..., checkpoint=, lengths=) -> the outcome of eval-ppl on 4 documents."""

    def call(*options, checkpoint=llama, data=corpus, lengths="24,64,128"):
        fixed = ["--data", data, "--lengths", lengths, "--max-documents", 4]
        return ropecli("eval-ppl", checkpoint, *fixed, *options)

    return call


@pytest.fixture
def measured(evaluate):
    """The report of `evaluate`."""

    def call(*options, **where) -> dict:
        return evaluate("--json", *options, **where).report()

    return call


@pytest.fixture
def source(llama, tmp_path) -> Path:
    """A copy of the checkpoint, for tests that look at what becomes of it."""
    return Path(shutil.copytree(llama, tmp_path / "source"))


@pytest.fixture
def stopping(monkeypatch):
    """with stopping(after, number): a signal comes after `after` samples; default: Ctrl-C. Yields the samples."""
    from ropecli.evaluation.driver import Store

    @contextlib.contextmanager
    def stop(after: int, number: int = signal.SIGINT) -> Iterator[list[tuple]]:
        add, samples = Store.add, []

        def adding(self, part, key, value):
            add(self, part, key, value)
            if key != ("reader",):
                samples.append(key)
                if len(samples) == after:
                    os.kill(os.getpid(), number)

        with monkeypatch.context() as patch:
            patch.setattr(Store, "add", adding)
            yield samples

    return stop


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "home" / "hub"


@pytest.fixture
def hub(llama, cache, monkeypatch):
    """A Hub with the tiny Llama; its revision v1 has a window of 32 tokens."""
    import huggingface_hub
    from huggingface_hub import constants

    server = FakeHub()
    files = {**bytes_of(llama), "modeling_own.py": b"x", "pytorch_model.bin": b"x"}
    files |= {"params.json": b"{}", "consolidated.safetensors": b"x"}
    older = json.dumps({**json.loads(files["config.json"]), "max_position_embeddings": 32}).encode()
    server.repositories[NAME] = Repository(
        {"main": MAIN, "v1": OLD}, {MAIN: files, OLD: {**files, "config.json": older}}
    )
    for key, value in {
        "ENDPOINT": server.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_DISABLE_XET": True,  # its storage is another server
        "HF_HUB_OFFLINE": False,
    }.items():
        monkeypatch.setattr(constants, key, value)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    huggingface_hub.close_session()  # the next one sees these settings
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.cut()
    thread.join()
