"""The folder of a run: its settings, and checkpoints that all processes save and restore together."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ropecli.checkpoint.opening import open_checkpoint
from ropecli.training.run_folder import Checkpoints, begin_run


class Run:
    """A tiny model that learns from random numbers: every bit of its state matters."""

    def __init__(self, output):
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        self.wrapped, self.optimizer = self.accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        self.checkpoints = Checkpoints(self.accelerator, output / "checkpoints", every=1, keep=3)
        self.step, self.said = 0, []

    def run(self, steps):
        for _ in range(steps):
            torch.manual_seed(2 * self.step + self.accelerator.process_index)
            self.accelerator.backward(self.wrapped(torch.randn(3, 4)).square().sum())
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
        return self

    def save(self):
        self.checkpoints.save(self.step)
        return self

    def restore(self):
        self.step = self.checkpoints.restore(self.said.append)
        return self

    def state(self):
        """All of it, to be compared bit by bit."""
        moments = [value for one in self.optimizer.state_dict()["state"].values() for value in one.values()]
        tensors = [*self.wrapped.state_dict().values(), *moments]
        return self.step, [tensor.numpy().tobytes() for tensor in tensors]


@pytest.fixture
def output(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def start(output):
    return lambda: Run(output)


def names(output):
    return sorted(path.name for path in (output / "checkpoints").iterdir())


def cut_a_file(folder):
    (folder / "optimizer.bin").write_bytes((folder / "optimizer.bin").read_bytes()[:-1])


def test_a_restored_run_gives_the_same_bits(start):
    whole = start().run(3).save().run(2)
    resumed = start().run(1).restore()
    assert (resumed.step, resumed.said) == (3, [])
    assert resumed.run(2).state() == whole.state()


def of_another_model(snapshot):
    """Sound by its manifest, and of no use."""
    from safetensors.torch import load_file, save_file

    from ropecli.resume import write_manifest

    state = load_file(snapshot / "model.safetensors")
    state["1.weight"] = torch.zeros(3, 8)
    save_file(state, snapshot / "model.safetensors", {"format": "pt"})
    (snapshot / "manifest.json").unlink()
    write_manifest(snapshot)


@pytest.mark.parametrize("damage", [cut_a_file, of_another_model])
def test_a_checkpoint_that_cannot_be_used_leaves_nothing_behind(start, output, damage):
    whole = start().run(2).save()
    before = whole.state()
    whole.run(2).save()
    damage(output / "checkpoints" / "000004")
    resumed = start().run(1).restore()
    assert resumed.state() == before
    assert "000004" in resumed.said[0]
    assert resumed.run(2).state() == start().run(4).state()


TWO = """
import os, pathlib, resource, sys
from accelerate.utils import gather_object
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.errors import OutputError
from test_run_folder import Run, cut_a_file


def main():
    output = pathlib.Path(sys.argv[1])
    whole = Run(output).run(1).save().run(1).save()
    accelerator, first = whole.accelerator, whole.accelerator.is_main_process
    whole.run(2)
    resumed = Run(output).run(1).restore()
    same = resumed.step == 2 and resumed.run(2).state() == whole.state()

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if not first:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        whole.save()
        full = ""
    except OutputError as error:
        full = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    accelerator.wait_for_everyone()
    left = sorted(path.name for path in (output / "checkpoints").iterdir())

    if first:
        (output / "checkpoints" / "000002" / "random_states_1.pkl").unlink()
    accelerator.wait_for_everyone()
    before = Run(output).restore()
    skipped = before.step == 1 and "random_states_1.pkl is missing" in before.said[0]

    if first:
        cut_a_file(output / "checkpoints" / "000001")
    accelerator.wait_for_everyone()
    try:
        Run(output).restore()
        none = ""
    except OutputError as error:
        none = str(error)

    sound = [same, "could not be written" in full, left == ["000001", "000002"], skipped]
    answers = gather_object([[*sound, "from any checkpoint" in none]])
    if first:
        print(*answers, sep="\\n", flush=True)
    accelerator.wait_for_everyone()
    os._exit(0)  # gloo at times aborts a process that ends after a DDP backward pass, with nothing but torch in it

main()
"""


@pytest.mark.slow
def test_two_processes_take_the_same_way(output, tmp_path):
    """What goes wrong in one of them is known to both."""
    (tmp_path / "two.py").write_text(TWO)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*launcher, str(tmp_path / "two.py"), str(output)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str([True] * 5)] * 2


def asked(**recipe):
    return {"source": {"checkpoint": "here", "digest": "abc"}, "recipe": {"steps": 6, "save_every": 2, **recipe}}


def test_what_does_not_touch_the_weights_may_change(output):
    demo = open_checkpoint("demo")
    begin_run(output, demo, asked(), resume=False)
    other = asked(save_every=1, keep_checkpoints=1, tracker="none", max_loss_rise=1.0, eval_every=2, eval_lengths=[8])
    other["source"]["checkpoint"] = "there"
    begin_run(output, demo, other, resume=True)
    shutil.rmtree(output)
    begin_run(output, demo, asked(stages=[{"steps": 1, "save_every": 2}]), resume=False)
    begin_run(output, demo, asked(stages=[{"steps": 1, "save_every": 3}]), resume=True)
