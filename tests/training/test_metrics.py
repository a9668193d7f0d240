"""metrics.jsonl and trackers get every number, and continue where a resumed run does."""

import json
import sys

import pytest

from ropecli.errors import RecipeError
from ropecli.training.run_folder import LOGS, RunLog, choose_tracker, losses_until


@pytest.fixture
def open_log(tmp_path):
    """open_log(done=None, tracker=None) -> the log of a run in tmp_path."""
    from accelerate import Accelerator

    def begin(done=None, tracker=None):
        accelerator = Accelerator(cpu=True, log_with=tracker, project_dir=str(tmp_path / LOGS))
        return RunLog(accelerator, tmp_path, done, {"length": 48})

    return begin


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_tracker_by_name_must_be_installed(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("ropecli.training.run_folder.find_spec", lambda module: None)
    with pytest.raises(RecipeError, match=f"pip install {name}"):
        choose_tracker(name)
    assert choose_tracker("auto") is None
    assert choose_tracker("none") is None


def read_back(folder, tag):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_continues_without_doubled_steps(open_log, tmp_path):
    """A run that was killed after its step 5 is resumed after step 3."""
    pytest.importorskip("tensorboard")
    killed = open_log(tracker="tensorboard")
    for step in range(6):
        killed.write({"step": step, "loss": float(step), "protocol": "tail"})
    killed.write({"step": 3, "ppl": {"64": 8.5}})
    killed.write({"step": 5, "ppl": {"64": 9.5}})
    killed.close()
    resumed = open_log(3, "tensorboard")
    for step in range(4, 8):
        resumed.write({"step": step, "loss": 100.0 + step})
    resumed.close()
    (folder,) = (tmp_path / LOGS).iterdir()
    losses = [*((step, float(step)) for step in range(4)), *((step, 100.0 + step) for step in range(4, 8))]
    assert read_back(folder, "loss") == losses
    assert read_back(folder, "ppl/64") == [(3, 8.5)]


def test_the_log_is_cut_back_to_the_step_and_a_line_that_was_cut_short_is_skipped(open_log, tmp_path):
    log = tmp_path / "metrics.jsonl"
    lines = [b'{"step": 1, "loss": 2.5}', b'{"step": 1, "ppl": {"64": 9.5}}', b'{"step": 2, "loss": 1.5}']
    log.write_bytes(b"\n".join([*lines, b'{"step": 3, "lo']))
    assert losses_until(tmp_path, 2) == {1: 2.5, 2: 1.5}
    open_log(1)
    assert log.read_bytes().splitlines() == lines[:2]
    open_log().write({"step": 0, "ppl": {"64": 9.5}})
    assert json.loads(log.read_text()) == {"step": 0, "ppl": {"64": 9.5}}
