"""SIGTERM, SIGHUP and Ctrl-C ask a run to stop; a second Ctrl-C stops it at once."""

import os
import signal
import time

import pytest

from ropecli import signals
from ropecli.signals import Terminated, terminated_by_signals
from ropecli.training.loop import stop_on_signals

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class OneProcess:
    num_processes = 1


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "ends_by"), zip(SIGNALS, (KeyboardInterrupt, Terminated, Terminated), strict=True))
def test_a_signal_is_remembered_and_the_run_ends_when_it_says_so(number, ends_by):
    said = []
    with stop_on_signals(said.append) as interrupt:
        send(number)
        assert interrupt.agreed(OneProcess)
        assert "Ctrl-C again" in said[0]
        with pytest.raises(ends_by):
            interrupt.stop("Saved after step 3.")
    assert said[1:] == ["Saved after step 3."]


def test_a_second_ctrl_c_is_obeyed_at_once():
    with stop_on_signals():
        send(signal.SIGINT)
        time.sleep(signals.ECHO_SECONDS + 0.05)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_the_same_ctrl_c_handed_on_by_a_launcher_is_no_second_one():
    said = []
    with stop_on_signals(said.append) as interrupt:
        for _ in range(3):
            send(signal.SIGINT)
        assert interrupt.agreed(OneProcess)
    assert len(said) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_is_ignored_stays_so(number):
    """As a shell's background and nohup have it."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with terminated_by_signals(), stop_on_signals() as interrupt:
            send(number)
            assert not interrupt.agreed(OneProcess)
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
