"""An interrupted run resumes to the bits of an uninterrupted one, or says why not. Kills: also test_random_kills.py."""

import os
import resource
import shutil
import signal
import time

import pytest

from ropecli import signals
from ropecli.errors import OutputError, RecipeError
from ropecli.signals import Terminated, terminated_by_signals
from ropecli.training import finetuning
from ropecli.training.interrupt import stop_on_signals
from ropecli.training.launch import Launch


class InterruptedRunError(Exception):
    pass


def interrupt_at(step):
    def on_step(progress):
        if progress.step == step:
            raise InterruptedRunError

    return on_step


def send(number):
    os.kill(os.getpid(), number)


@pytest.fixture
def interrupted(tune, patched_llama, tmp_path):
    """A run that ended in its step 5; its newest checkpoint is of step 4."""
    with pytest.raises(InterruptedRunError):
        tune(patched_llama, on_step=interrupt_at(5))
    return tmp_path / "run"


@pytest.fixture
def assert_same_run(metrics, weights_of):
    """assert_same_run(run, run): weights, metrics and files are the same."""

    def check(run, other):
        assert weights_of(run) == weights_of(other)
        lines = [[{**line, "tokens_per_second": 0} for line in metrics(folder)] for folder in (run, other)]
        assert lines[0] == lines[1]
        assert {path.name for path in run.iterdir()} == {path.name for path in other.iterdir()}

    return check


def test_run_interrupted_several_times_equals_an_uninterrupted_one(tune, patched_llama, uninterrupted, assert_same_run):
    for step in (1, 3, 4, 6):
        with pytest.raises(InterruptedRunError):
            tune(patched_llama, resume=True, on_step=interrupt_at(step))
    assert_same_run(tune(patched_llama, resume=True), uninterrupted)


def test_damaged_checkpoint_costs_only_the_steps_since_the_one_before(
    interrupted, ropecli, command_line, patched_llama, uninterrupted, assert_same_run
):
    optimizer = interrupted / "checkpoints" / "000004" / "optimizer.bin"
    optimizer.write_bytes(optimizer.read_bytes()[:-1])
    command = (*command_line(patched_llama, interrupted), "--resume")
    ropecli(*command).is_refused("optimizer.bin is missing or incomplete. Delete it to resume from the one before")
    shutil.rmtree(optimizer.parent)
    outcome = ropecli(*command)
    assert outcome.code == 0, outcome.err
    assert "Resuming after step 2" in outcome.err
    assert_same_run(interrupted, uninterrupted)


def test_tied_weights_random_state_and_mixed_data_resume_exactly(
    build, tune, tmp_path, assert_same_run, text_and_chat, chat_template
):
    source = build("llama", head_dim=32, tie_word_embeddings=True, attention_dropout=0.3)
    (source / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    keys = {"mixture": text_and_chat, "loss_weighting": "documents"}
    with pytest.raises(InterruptedRunError):
        tune(source, on_step=interrupt_at(3), **keys)
    assert_same_run(tune(source, resume=True, **keys), tune(source, tmp_path / "uninterrupted", **keys))


@pytest.mark.parametrize("save_every", [1, 99])
def test_newest_checkpoints_are_kept_during_the_run_and_none_after_it(
    save_every, tune, patched_llama, tmp_path, monkeypatch
):
    if save_every > 5:
        monkeypatch.setattr(finetuning, "_SAVE_AFTER", 0)  # steps that take that long
    kept = {}

    def look(progress):
        folder = tmp_path / "run" / "checkpoints"
        kept[progress.step] = sorted(int(path.name) for path in folder.iterdir()) if folder.exists() else []

    run = tune(patched_llama, steps=5, save_every=save_every, keep_checkpoints=2, on_step=look)
    assert kept == {1: [], 2: [1], 3: [1, 2], 4: [2, 3], 5: [3, 4]}
    assert not (run / "checkpoints").exists()


def test_other_settings_and_a_second_start_are_refused(interrupted, tune, patched_llama, metrics):
    before = (interrupted / "run.yaml").read_text()
    with pytest.raises(RecipeError) as caught:
        tune(patched_llama, resume=True, steps=8, seed=1)
    assert all(line in str(caught.value) for line in ("steps: 6 then, 8 now", "seed: 0 then, 1 now"))
    with pytest.raises(OutputError, match="--resume"):
        tune(patched_llama)
    assert (interrupted / "run.yaml").read_text() == before
    assert [line["step"] for line in metrics(interrupted)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated), (signal.SIGHUP, Terminated)]
)
def test_signal_ends_the_run_only_after_its_step(number, error):
    said = []
    with stop_on_signals(said.append) as interrupt:
        for _ in range(3):  # as passed on by a launcher
            send(number)
        assert interrupt.agreed(Launch())
        with pytest.raises(error) as stopped:
            interrupt.stop("Saved after step 3.")
    if error is KeyboardInterrupt:
        said.append(str(stopped.value))  # which the command line prints
    assert said[1] == "Saved after step 3."
    assert "Ctrl-C again" in said[0]


def test_second_ctrl_c_stops_at_once():
    with stop_on_signals():
        send(signal.SIGINT)
        time.sleep(signals.ECHO_SECONDS + 0.05)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ignored_signal_stays_ignored(number):
    """As under nohup, or in a shell's background."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with terminated_by_signals(), stop_on_signals() as interrupt:
            send(number)
            assert not interrupt.agreed(Launch())
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_full_disk_while_saving_keeps_the_earlier_checkpoint(
    tune, patched_llama, tmp_path, uninterrupted, assert_same_run
):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill_disk(progress):
        if progress.step == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))

    try:
        with pytest.raises(OutputError, match="could not be written"):
            tune(patched_llama, on_step=fill_disk)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["000002"]
    assert_same_run(tune(patched_llama, resume=True), uninterrupted)
