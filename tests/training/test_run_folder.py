"""The folder of a run: its settings, its metrics, and checkpoints that all processes save and restore together."""

import json

import pytest

from ropecli.errors import RecipeError
from ropecli.training.launch import Launch
from ropecli.training.run_folder import LOGS, RunLog, begin_run, choose_tracker, metrics_until


def settings(**recipe):
    return {"source": {"checkpoint": "here", "digest": "abc"}, "recipe": {"steps": 6, "save_every": 2, **recipe}}


def test_only_settings_that_do_not_affect_the_weights_may_change(tmp_path):
    output = tmp_path / "run"
    begin_run(output, settings())
    other = settings(save_every=1, keep_checkpoints=1, tracker="none", eval_every=2)
    other["source"]["checkpoint"] = "there"
    begin_run(output, other)
    other["source"]["digest"] = "def"
    with pytest.raises(RecipeError, match=r"source\.digest: 'abc' then, 'def' now"):
        begin_run(output, other)


@pytest.fixture
def open_log(tmp_path):
    """open_log(done=0, tracker=None) -> the log of a run in tmp_path."""
    from accelerate import Accelerator

    def begin(done=0, tracker=None):
        accelerator = Accelerator(cpu=True, log_with=tracker, project_dir=str(tmp_path / LOGS))
        return RunLog(Launch.of(accelerator), tmp_path, done, {"length": 48})

    return begin


def test_tracker_given_by_name_must_be_installed(monkeypatch):
    monkeypatch.setattr("ropecli.training.run_folder.find_spec", lambda module: None)
    with pytest.raises(RecipeError, match="pip install wandb"):
        choose_tracker("wandb")
    assert choose_tracker("auto") is None


def test_tensorboard_of_a_resumed_run_has_no_doubled_steps(open_log, tmp_path):
    """A run that was killed after its step 5 is resumed after step 3."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    killed = open_log(tracker="tensorboard")
    for step in range(6):
        killed.write({"step": step, "loss": float(step), "protocol": "tail", "ppl": {"64": 8.5}})
    killed.close()
    resumed = open_log(3, "tensorboard")
    for step in range(4, 8):
        resumed.write({"step": step, "loss": 100.0 + step})
    resumed.close()
    (folder,) = (tmp_path / LOGS).iterdir()
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    assert [event.value for event in events.Scalars("loss")] == [0, 1, 2, 3, 104, 105, 106, 107]
    assert [event.step for event in events.Scalars("ppl/64")] == [0, 1, 2, 3]


def test_metrics_are_cut_back_to_the_step_and_a_truncated_line_is_skipped(open_log, tmp_path):
    log = tmp_path / "metrics.jsonl"
    lines = [b'{"step": 1, "loss": 2.5}', b'{"step": 1, "ppl": {"64": 9.5}}', b'{"step": 2, "loss": 1.5}']
    log.write_bytes(b"\n".join([*lines, b'{"step": 3, "lo']))
    assert metrics_until(tmp_path, 2) == [*map(json.loads, lines)]
    open_log(1)
    assert log.read_bytes().splitlines() == lines[:2]
    open_log().write({"step": 0, "ppl": {"64": 9.5}})
    assert json.loads(log.read_text()) == {"step": 0, "ppl": {"64": 9.5}}


TWO = """
import os, resource
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from ropecli.errors import OutputError
from ropecli.training.launch import Launch
from ropecli.training.run_folder import TrainingCheckpoints

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 8)
wrapped, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
checkpoints, first = TrainingCheckpoints(Launch.of(accelerator), folder, keep=3), accelerator.is_main_process
checkpoints.save(1)
checkpoints.save(2)

limits = resource.getrlimit(resource.RLIMIT_FSIZE)
if not first:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
try:
    checkpoints.save(4)
    full = ""
except OutputError as error:
    full = str(error)
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
accelerator.wait_for_everyone()
left = sorted(path.name for path in folder.iterdir())

if first:
    (folder / "000002" / "random_states_1.pkl").unlink()
accelerator.wait_for_everyone()
try:
    checkpoints.restore()
    damaged = ""
except OutputError as error:
    damaged = str(error)
missing = "random_states_1.pkl is missing or incomplete" in damaged
answers = gather_object([["could not be written" in full, left == ["000001", "000002"], missing]])
if first:
    print(*answers, sep="\\n", flush=True)
accelerator.wait_for_everyone()
os._exit(0)  # gloo at times aborts a process that ends after a DDP backward pass, with nothing but torch in it
"""


@pytest.mark.slow
def test_two_processes_both_know_what_failed_in_one(fork, tmp_path):
    process = fork(exec, TWO, {"folder": tmp_path / "checkpoints"}, processes=2)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert out.splitlines() == [str([True] * 3)] * 2
