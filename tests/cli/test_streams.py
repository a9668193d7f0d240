"""Standard output and error that cannot be written: nothing that was computed is lost, and there is no traceback."""

import subprocess
import sys

import pytest

FULL = "/dev/full"
INSPECT = [sys.executable, "-m", "ropecli", "inspect", "demo"]


@pytest.fixture
def full():
    try:
        with open(FULL, "w") as file:  # noqa: PTH123
            yield file
    except OSError:
        pytest.skip(f"no {FULL} here")


@pytest.mark.parametrize("command", [INSPECT, [sys.executable, "-u", *INSPECT[1:], "--json"]])
def test_a_full_disk_behind_the_output(full, command):
    """The result is printed on standard error, before the message."""
    expected = subprocess.run(command, capture_output=True, text=True).stdout
    done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    said = "Cannot write standard output: No space left on device."
    assert done.returncode == 2
    assert done.stderr.startswith(f"{expected}error: {said}")
    assert done.stderr.count("\n") == expected.count("\n") + 1


def test_a_full_disk_behind_the_messages(full, tmp_path):
    """With progress bars and a warning."""
    command = ["eval-ppl", "demo", "--data", "demo", "--lengths", "256", "--max-documents", "1"]
    done = subprocess.run([*INSPECT[:3], *command], stdout=subprocess.PIPE, stderr=full, text=True)
    assert done.returncode == 0
    assert "perplexity by length" in done.stdout
    refused = subprocess.run([*INSPECT[:-1], tmp_path / "missing"], stderr=full)
    assert refused.returncode == 2


@pytest.mark.parametrize("more", [["--json"], ["--help"]])
def test_a_reader_that_goes_is_no_error(more):
    process = subprocess.Popen([*INSPECT, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 0


def test_a_closed_output_is_no_error():
    done = subprocess.run(f"{subprocess.list2cmdline(INSPECT)} --json >&-", shell=True, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")
