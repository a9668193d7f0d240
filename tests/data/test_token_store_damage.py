"""The token cache under kills, several processes at once, damaged files and full disks."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from letters import Letters, texts

from ropecli.data.store import open_store
from ropecli.errors import OutputError


def started(code):
    """A process in which `open_store`, `Letters` and `texts` are there."""
    names = "from letters import Letters, texts\nfrom ropecli.data.store import open_store\n"
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


def test_a_kill_in_the_middle_leaves_nothing_that_is_taken_for_whole(cache, digest):
    for _ in range(2):
        process = started("open_store('key', lambda: texts(wait=0.02), Letters())")
        until = time.monotonic() + 60
        while not sum(path.stat().st_size for path in cache.rglob("*.arrow")) and time.monotonic() < until:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        process.communicate()
        assert sum(path.stat().st_size for path in cache.rglob("*.arrow"))  # guards: it was writing
    begun = []
    store = open_store("key", lambda: begun.append(1) or texts(), Letters())
    assert begun == [1]
    assert store.digest == digest


def test_processes_at_once_tokenize_once(cache, tmp_path, digest):
    code = f"""
def told():
    open({str(tmp_path / "told")!r}, "a").write("begun\\n")
    yield from texts(wait=0.005)

print(open_store("key", told, Letters()).digest)
"""
    processes = [started(code) for _ in range(3)]
    answers = [process.communicate(timeout=120) for process in processes]
    assert answers == [(f"{digest}\n", "")] * 3
    assert (tmp_path / "told").read_text() == "begun\n"


def test_a_process_that_waits_for_a_killed_one_takes_over(cache, digest):
    first = started("open_store('key', lambda: texts(wait=0.05), Letters())")
    while not list(cache.rglob("*.lock")):
        time.sleep(0.01)
    second = started("print(open_store('key', texts, Letters()).digest)")
    time.sleep(2)
    assert second.poll() is None  # guards: it waits
    first.kill()
    first.communicate()
    assert second.communicate(timeout=120) == (f"{digest}\n", "")


def truncated(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def without_its_end(path):
    path.write_bytes(path.read_bytes()[:-700])


def flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def emptied(path):
    path.write_bytes(b"")


def junk(path):
    path.write_bytes(b"junk" * 1000)


@pytest.mark.parametrize("damage", [truncated, without_its_end, flipped, emptied, junk, os.unlink])
@pytest.mark.parametrize("name", ["*.arrow", "dataset_info.json"])
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
    code = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    open_store("key", texts, Letters())
except Exception as error:
    print(type(error).__name__, error)
"""
    out, err = started(code).communicate(timeout=120)
    assert err == ""
    assert out.startswith("OutputError The tokens could not be written to the cache")
    assert "File too large" in out
    assert "ROPECLI_CACHE" in out
    assert not list(cache.rglob("*.arrow"))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_said(tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir(mode=0o500)
    monkeypatch.setenv("ROPECLI_CACHE", str(tmp_path / "cache"))
    with pytest.raises(OutputError, match="ROPECLI_CACHE"):
        open_store("key", texts, Letters())
