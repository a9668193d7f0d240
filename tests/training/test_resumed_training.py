"""An interrupted run resumes to the very bits of an uninterrupted one, or says why it cannot."""

import os
import resource
import shutil
import signal

import pytest
import yaml

from ropecli.errors import OutputError, RecipeError
from ropecli.signals import Terminated


class InterruptedRunError(Exception):
    pass


def interrupt_at(step):
    def on_step(progress):
        if progress.step == step:
            raise InterruptedRunError

    return on_step


def steps_of(metrics, run):
    return [line["step"] for line in metrics(run)]


@pytest.fixture
def interrupted(tune, patched_llama, tmp_path):
    """A run that ended in its step 5; its newest checkpoint is of step 4."""
    with pytest.raises(InterruptedRunError):
        tune(patched_llama, on_step=interrupt_at(5))
    return tmp_path / "run"


def test_a_resumed_run_equals_an_uninterrupted_one(tune, patched_llama, metrics, uninterrupted, weights_of):
    for moment in (1, 3, 4, 6):
        with pytest.raises(InterruptedRunError):
            tune(patched_llama, resume=True, on_step=interrupt_at(moment))
    run = tune(patched_llama, resume=True)
    assert weights_of(run) == weights_of(uninterrupted)
    assert steps_of(metrics, run) == [1, 2, 3, 4, 5, 6]
    assert untimed(metrics(run)) == untimed(metrics(uninterrupted))


def untimed(lines):
    return [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in lines]


@pytest.mark.parametrize(("number", "step"), [(signal.SIGINT, 1), (signal.SIGTERM, 5)], ids=str)
def test_a_signal_saves_after_the_step_and_the_run_resumes_from_there(
    tune, patched_llama, tmp_path, metrics, uninterrupted, weights_of, number, step
):
    def send(progress):
        if progress.step == step:
            os.kill(os.getpid(), number)

    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else Terminated):
        tune(patched_llama, on_step=send)
    assert max(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == f"{step:06}"
    run = tune(patched_llama, resume=True)
    assert weights_of(run) == weights_of(uninterrupted)
    assert untimed(metrics(run)) == untimed(metrics(uninterrupted))


def test_a_damaged_checkpoint_costs_no_more_than_the_steps_since_the_one_before(
    interrupted, ropecli, command_line, patched_llama, metrics, uninterrupted, weights_of
):
    optimizer = interrupted / "checkpoints" / "000004" / "optimizer.bin"
    optimizer.write_bytes(optimizer.read_bytes()[:-1])
    outcome = ropecli(*command_line(patched_llama, interrupted), "--resume")
    assert outcome.code == 0, outcome.err
    assert "warning: skipping the checkpoint" in outcome.err
    assert "Resuming after step 2" in outcome.err
    assert weights_of(interrupted) == weights_of(uninterrupted)
    assert untimed(metrics(interrupted)) == untimed(metrics(uninterrupted))


def test_tied_weights_random_state_and_mixed_data_resume_exactly(
    build, tune, tmp_path, weights_of, text_and_chat, chat_template
):
    source = build("llama", head_dim=32, tie_word_embeddings=True, attention_dropout=0.3)
    (source / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    keys = {"mixture": text_and_chat, "loss_weighting": "documents"}
    with pytest.raises(InterruptedRunError):
        tune(source, on_step=interrupt_at(3), **keys)
    resumed = tune(source, resume=True, **keys)
    assert weights_of(resumed) == weights_of(tune(source, tmp_path / "uninterrupted", **keys))


def test_the_newest_checkpoints_are_kept_while_it_runs_and_none_at_the_end(tune, patched_llama, tmp_path):
    kept = {}

    def look(progress):
        folder = tmp_path / "run" / "checkpoints"
        kept[progress.step] = sorted(path.name for path in folder.iterdir()) if folder.exists() else []

    run = tune(patched_llama, steps=5, save_every=1, keep_checkpoints=2, on_step=look)
    assert kept == {
        1: [],
        2: ["000001"],
        3: ["000001", "000002"],
        4: ["000002", "000003"],
        5: ["000003", "000004"],
    }
    assert not (run / "checkpoints").exists()


def test_other_settings_are_refused_by_name(interrupted, tune, patched_llama, metrics):
    before = (interrupted / "run.yaml").read_text()
    with pytest.raises(RecipeError) as caught:
        tune(patched_llama, resume=True, steps=8, seed=1)
    assert all(line in str(caught.value) for line in ("steps: 6 then, 8 now", "seed: 0 then, 1 now"))
    assert (interrupted / "run.yaml").read_text() == before
    assert steps_of(metrics, interrupted) == [1, 2, 3, 4, 5]


def test_a_run_of_an_earlier_release_is_resumed_by_its_digest(
    interrupted, tune, patched_llama, earlier_digest, caplog, weights_of, uninterrupted
):
    settings = yaml.safe_load((interrupted / "run.yaml").read_text())
    for digest in ("0" * 64, earlier_digest(patched_llama)):
        settings["source"]["digest"] = digest
        (interrupted / "run.yaml").write_text(yaml.safe_dump(settings))
        if digest.startswith("000"):
            with pytest.raises(RecipeError, match=r"source\.digest: '0000"):
                tune(patched_llama, resume=True)
    tune(patched_llama, resume=True)
    assert sum("of an earlier release" in message for message in caplog.messages) == 1
    assert weights_of(interrupted) == weights_of(uninterrupted)


def test_a_run_is_not_begun_again_without_being_asked_to_resume(interrupted, tune, patched_llama, metrics):
    with pytest.raises(OutputError, match="--resume"):
        tune(patched_llama)
    assert steps_of(metrics, interrupted) == [1, 2, 3, 4, 5]


def test_a_finished_run_is_left_alone(tune, patched_llama, weights_of, uninterrupted, tmp_path):
    run = shutil.copytree(uninterrupted, tmp_path / "run")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    tune(patched_llama, resume=True)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.fixture
def small_disk():
    """small_disk(bytes): no file can grow further; the kernel then refuses to write, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_fills_while_a_checkpoint_is_saved(
    tune, patched_llama, small_disk, tmp_path, uninterrupted, weights_of, metrics
):
    def on_step(progress):
        if progress.step == 4:
            small_disk(100_000)

    with pytest.raises(OutputError, match="could not be written"):
        tune(patched_llama, on_step=on_step)
    small_disk(resource.RLIM_INFINITY)
    # what is useless does not fill the disk further
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["000002"]
    run = tune(patched_llama, resume=True)
    assert weights_of(run) == weights_of(uninterrupted)
    assert steps_of(metrics, run) == [1, 2, 3, 4, 5, 6]
