"""The token cache under kills, several processes at once, damaged files and full disks."""

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from letters import Letters, texts

from ropecli.data.token_store import open_store
from ropecli.errors import OutputError


def started(code):
    """A process in which `open_store`, `Letters` and `texts` are there."""
    names = "from letters import Letters, texts\nfrom ropecli.data.token_store import open_store\n"
    return subprocess.Popen(
        [sys.executable, "-c", names + code],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ROPECLI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def digest(tmp_path_factory):
    """Of a store that nothing has happened to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROPECLI_CACHE", str(tmp_path_factory.mktemp("untouched")))
        return open_store("key", texts, Letters()).digest


def test_processes_at_once_tokenize_once_and_one_takes_over_from_a_killed_one(cache, tmp_path, digest):
    code = f"""
def told():
    open({str(tmp_path / "told")!r}, "a").write("begun\\n")
    yield from texts(wait=WAIT)

print(open_store('key', told, Letters()).digest)
"""
    first = started(code.replace("WAIT", "1.0"))
    while not (tmp_path / "told").exists():
        time.sleep(0.01)
    others = [started(code.replace("WAIT", "0.005")) for _ in range(2)]
    time.sleep(2)
    assert [process.poll() for process in others] == [None, None]  # guards: they wait
    first.kill()
    first.communicate()
    answers = [process.communicate(timeout=120) for process in others]
    assert answers == [(f"{digest}\n", "")] * 2
    assert (tmp_path / "told").read_text() == "begun\n" * 2


def truncated(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def junk(path):
    path.write_bytes(b"junk" * 1000)


@pytest.mark.parametrize(
    ("name", "damage"),
    [("*.arrow", truncated), ("*.arrow", flipped), ("*.arrow", os.unlink), ("dataset_info.json", junk)],
)
def test_a_damaged_cache_is_made_again(cache, digest, damage, name, capfd):
    open_store("key", texts, Letters())
    (path,) = cache.rglob(name)
    damage(path)
    begun = []
    for _ in range(2):
        assert open_store("key", lambda: begun.append(1) or texts(), Letters()).digest == digest
    assert len(begun) <= 1  # what describes the file can be read in spite of a changed letter
    assert begun or name != "*.arrow"
    assert capfd.readouterr() == ("", "")


def test_a_full_disk_is_said_and_leaves_nothing(cache):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OutputError, match=r"Cannot write tokens to the cache.*File too large.*ROPECLI_CACHE"):
            open_store("key", texts, Letters())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(cache.rglob("*.arrow"))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_said(tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir(mode=0o500)
    monkeypatch.setenv("ROPECLI_CACHE", str(tmp_path / "cache"))
    with pytest.raises(OutputError, match="ROPECLI_CACHE"):
        open_store("key", texts, Letters())
