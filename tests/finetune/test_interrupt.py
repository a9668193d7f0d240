"""SIGTERM, SIGHUP and Ctrl-C become a wish that a run asks for; a second Ctrl-C is obeyed at once."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from ropecli import signals
from ropecli.finetune.interrupt import stop_on_signals
from ropecli.signals import Terminated, terminated_by_signals

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class OneProcess:
    num_processes = 1


def send(number):
    os.kill(os.getpid(), number)


def test_nothing_is_asked_without_a_signal():
    with stop_on_signals() as wish:
        assert not wish.agreed(OneProcess)


@pytest.mark.parametrize(("number", "ends_by"), zip(SIGNALS, (KeyboardInterrupt, Terminated, Terminated), strict=True))
def test_a_signal_is_remembered_and_the_run_ends_when_it_says_so(number, ends_by):
    said = []
    with stop_on_signals(said.append) as wish:
        send(number)
        assert wish.agreed(OneProcess)
        assert "once more" in said[0]
        with pytest.raises(ends_by):
            wish.stop("Saved after step 3.")
    assert said[1:] == ["Saved after step 3."]


def test_a_second_ctrl_c_is_obeyed_at_once():
    with stop_on_signals():
        send(signal.SIGINT)
        time.sleep(signals.ECHO_SECONDS + 0.05)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_the_same_ctrl_c_handed_on_by_a_launcher_is_no_second_one():
    said = []
    with stop_on_signals(said.append) as wish:
        for _ in range(3):
            send(signal.SIGINT)
        assert wish.agreed(OneProcess)
    assert len(said) == 1


def test_a_second_sigterm_waits_as_the_first_does():
    with stop_on_signals() as wish:
        send(signal.SIGTERM)
        time.sleep(signals.ECHO_SECONDS + 0.05)
        send(signal.SIGTERM)
        assert wish.agreed(OneProcess)


def test_a_voice_that_cannot_speak_amid_a_line_stops_nothing():
    def say(message):
        raise RuntimeError("reentrant call inside <_io.BufferedWriter>")

    with stop_on_signals(say) as wish:
        send(signal.SIGTERM)
        assert wish.agreed(OneProcess)


def test_the_handlers_are_given_back():
    before = [signal.getsignal(number) for number in SIGNALS]
    with stop_on_signals():
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_is_ignored_stays_so(number):
    """As a shell's background and nohup have it."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with terminated_by_signals(), stop_on_signals() as wish:
            send(number)
            assert not wish.agreed(OneProcess)
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_beside_the_main_thread_no_handler_is_touched():
    before = [signal.getsignal(number) for number in SIGNALS]
    seen = []

    def run():
        with stop_on_signals() as wish:
            seen.append([signal.getsignal(number) for number in SIGNALS])
            seen.append(wish.agreed(OneProcess))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before, False]


TWO = """
import os, signal, sys, time
from accelerate import Accelerator
from ropecli.finetune.interrupt import stop_on_signals

accelerator = Accelerator(cpu=True)
with stop_on_signals() as wish:
    assert not wish.agreed(accelerator)
    if accelerator.process_index == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    assert wish.agreed(accelerator)
    if accelerator.process_index == 0:
        os.kill(os.getpid(), signal.SIGINT)  # its first: not to be taken for a second one
    accelerator.wait_for_everyone()
    try:
        wish.stop("")
    except SystemExit as stop:
        # in one piece: two processes that print to one pipe may end their lines in turn
        os.write(1, f"process {accelerator.process_index} ends with {stop.code}\\n".encode())
accelerator.end_training()
"""


def test_two_processes_stop_together_when_one_is_asked(tmp_path):
    (tmp_path / "two.py").write_text(TWO)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run([*launcher, str(tmp_path / "two.py")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"process {index} ends with 143" for index in (0, 1)]
