"""Trackers get every number, go on where a resumed run does, and never end a run."""

import sys
from types import SimpleNamespace

import pytest

from ropecli.errors import RecipeError
from ropecli.training.output.metrics_log import LOGS, Trackers, choose_tracker, open_trackers


@pytest.fixture
def accelerator():
    from accelerate import Accelerator

    return Accelerator(cpu=True)


@pytest.fixture
def open_in(accelerator, tmp_path):
    """open_in(tracker) -> (trackers, what will be said), in tmp_path."""

    def begin(tracker: str):
        said = []
        return open_trackers(accelerator, SimpleNamespace(tracker=tracker), tmp_path, {"length": 48}, said.append), said

    return begin


@pytest.fixture
def broken():
    """A tracker that fails from its third line on."""
    from accelerate.tracking import GeneralTracker

    class Broken(GeneralTracker):
        name = "broken"
        requires_logging_directory = False
        tracker = None

        def __init__(self):
            super().__init__()
            self.lines, self.finished = [], 0

        def log(self, values, step=None, **options):
            if len(self.lines) == 2:
                raise ConnectionError("the line is dead.\nand more of it")
            self.lines.append((step, values))

        def finish(self):
            self.finished += 1

    return Broken()


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_tracker_by_name_must_be_installed(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("ropecli.training.output.metrics_log.find_spec", lambda module: None)
    with pytest.raises(RecipeError, match=f"pip install {name}"):
        choose_tracker(name)
    assert choose_tracker("auto") is None
    assert choose_tracker("none") is None


def test_numbers_are_told_by_their_names(accelerator, broken):
    with Trackers(accelerator, lambda step: broken, {}, pytest.fail) as trackers:
        trackers.log({"step": 7, "loss": 2.5, "grad_norm": 1})
        trackers.log({"step": 7, "ppl": {"64": 9.5, "128": 8.5}, "protocol": "tail", "documents": 4})
    assert broken.lines == [
        (7, {"loss": 2.5, "grad_norm": 1}),
        (7, {"ppl/64": 9.5, "ppl/128": 8.5, "documents": 4}),
    ]
    assert broken.finished == 1


def test_a_tracker_that_fails_is_left_out_and_said_so_once(accelerator, broken):
    said = []
    with Trackers(accelerator, lambda step: broken, {}, said.append) as trackers:
        for step in range(1, 6):
            trackers.log({"step": step, "loss": 2.0})
    assert [step for step, _ in broken.lines] == [1, 2]
    assert said == ["warning: the tracker failed and is left out: the line is dead. metrics.jsonl goes on."]
    assert broken.finished == 1


def read_back(folder, tag):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_goes_on_without_doubled_steps(open_in, tmp_path):
    """A run that was killed after its step 5 is resumed at a checkpoint's next step."""
    first = 4
    pytest.importorskip("tensorboard")
    killed, _ = open_in("tensorboard")
    with killed:
        for step in range(6):
            killed.log({"step": step, "loss": float(step)})
        killed.log({"step": 5, "ppl": {"64": 9.5}})
    trackers, said = open_in("auto")
    with trackers:
        for step in range(first, 8):
            trackers.log({"step": step, "loss": 100.0 + step})
    assert not said
    kept, again = range(first), range(first, 8)
    assert read_back(tmp_path / LOGS, "loss") == [*((n, float(n)) for n in kept), *((n, 100.0 + n) for n in again)]
    assert read_back(tmp_path / LOGS, "ppl/64") == []
    assert [path.name for path in tmp_path.iterdir()] == [LOGS]
