"""Checkpoints of a run: whole or not at all; a damaged one is left out for the one before."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from ropecli.errors import OutputError, RecipeError
from ropecli.training.optimization import losses_until
from ropecli.training.output.metrics_log import MetricsLog
from ropecli.training.output.run_settings import begin_run
from ropecli.training.output.training_checkpoints import ResumePoint, restore_newest, save_checkpoint

PASSES = 3


class Run:
    """A tiny model with dropout that learns from random numbers: every bit of its state matters."""

    def __init__(self, output):
        from accelerate import Accelerator

        self.output, self.said = output, []
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=PASSES)
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(self.accelerator.process_index)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 2))
        self.wrapped, self.optimizer = self.accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        self.point, self.loss = ResumePoint(0), 0.0

    def go_on(self, passes):
        for _ in range(passes):
            with self.accelerator.accumulate(self.wrapped):
                noise = random.random() + np.random.rand()
                loss = self.wrapped(torch.randn(3, 4) + noise).square().sum()
                self.accelerator.backward(loss)
                self.loss += float(loss.detach())
                if ends := self.accelerator.sync_gradients:
                    self.loss = 0.0
                self.optimizer.step()
                self.optimizer.zero_grad()
            step, part = self.point.step, self.point.passes
            assert ends == (part + 1 == PASSES)
            self.point = ResumePoint(step + 1) if ends else ResumePoint(step, part + 1)
        return self

    def save(self, keep=3):
        save_checkpoint(self.accelerator, self.wrapped, self.output, self.point, keep, loss=self.loss)
        return self

    def restore(self):
        self.point, self.loss = restore_newest(self.accelerator, self.wrapped, self.output, self.said.append)
        return self

    def state(self):
        """All of it, to be compared bit by bit."""
        tensors = {
            **self.wrapped.state_dict(),
            **{f"{name}.grad": p.grad for name, p in self.wrapped.named_parameters() if p.grad is not None},
            **{
                f"{n}.{key}": value
                for n, one in self.optimizer.state_dict()["state"].items()
                for key, value in one.items()
            },
        }
        return self.point, self.loss, {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


@pytest.fixture
def output(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def start(output):
    return lambda: Run(output)


def names(output):
    return sorted(path.name for path in (output / "checkpoints").iterdir())


@pytest.mark.parametrize(("before", "after"), [(2, 0), (8, 5)])
def test_a_restored_run_goes_on_to_the_same_bits(start, before, after):
    whole = start().go_on(before).save().go_on(after)
    # a fresh process is at other random numbers, another rate and another pass
    resumed = start().go_on(after + 1).restore()
    assert resumed.said == []
    assert resumed.point == ResumePoint(before // PASSES, before % PASSES)
    assert resumed.go_on(after).state() == whole.state()


def remove_the_gradients(folder):
    (folder / "gradients_0.safetensors").unlink()


def cut_the_manifest(folder):
    (folder / "manifest.json").write_bytes((folder / "manifest.json").read_bytes()[:-9])


def name_no_files(folder):
    (folder / "manifest.json").write_text("{}")


def cut_a_file(folder):
    (folder / "optimizer.bin").write_bytes((folder / "optimizer.bin").read_bytes()[:-1])


def flip_a_bit(folder):
    content = bytearray((folder / "random_states_0.pkl").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "random_states_0.pkl").write_bytes(content)


def empty_it(folder):
    shutil.rmtree(folder)
    folder.mkdir()


DAMAGES = {
    remove_the_gradients: "gradients_0.safetensors is missing",
    cut_the_manifest: "manifest.json is missing or cannot be read",
    name_no_files: "manifest.json names no file",
    cut_a_file: "optimizer.bin has",
    flip_a_bit: "random_states_0.pkl has other bytes",
    empty_it: "manifest.json is missing",
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGES.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_damaged_checkpoint_is_left_out_for_the_one_before(start, output, damage, reason):
    whole = start().go_on(PASSES).save()
    before = whole.state()
    whole.go_on(1).save()
    damage(output / "checkpoints" / "000001-001")
    resumed = start().restore()
    assert resumed.state() == before
    (warning,) = resumed.said
    assert warning.startswith("warning: ")
    assert "000001-001" in warning
    assert reason in warning


def of_another_model(output):
    """Whole, by its manifest, and of no use."""
    from ropecli.training.output.training_checkpoints import write_manifest

    newest = output / "checkpoints" / names(output)[-1]
    from safetensors.torch import load_file, save_file

    state = load_file(newest / "model.safetensors")
    state["2.weight"] = torch.zeros(3, 8)
    save_file(state, newest / "model.safetensors", {"format": "pt"})
    (newest / "manifest.json").unlink()
    write_manifest(newest)


def test_a_whole_one_that_cannot_be_loaded_leaves_nothing_behind(start, output):
    whole = start().go_on(2 * PASSES).save()
    state = whole.state()
    whole.go_on(2).save()
    of_another_model(output)
    resumed = start().go_on(1).restore()
    assert resumed.state() == state
    assert "000002-002" in resumed.said[0]
    assert resumed.go_on(4).state() == start().go_on(2 * PASSES + 4).state()


def test_with_all_damaged_the_run_does_not_begin_anew_by_itself(start, output):
    run = start().go_on(1).save().go_on(1).save()
    for name in names(output):
        cut_a_file(output / "checkpoints" / name)
    with pytest.raises(OutputError) as caught:
        start().restore()
    assert "--output" in str(caught.value)
    assert str(caught.value).count("optimizer.bin has") == 2
    assert len(names(output)) == 2
    assert run.point == ResumePoint(0, 2)


TWO = """
import os, pathlib, resource, sys
from accelerate.utils import gather_object
from ropecli.errors import OutputError
from test_training_checkpoints import ResumePoint, Run, cut_a_file


def main():
    output = pathlib.Path(sys.argv[1])
    whole = Run(output).go_on(3).save().go_on(2).save()
    accelerator, first = whole.accelerator, whole.accelerator.is_main_process
    random_numbers_differ = len(set(gather_object([whole.loss]))) == 2
    whole.go_on(5)
    resumed = Run(output).go_on(1).restore()
    going_on = resumed.point == ResumePoint(1, 2) and resumed.go_on(5).state() == whole.state()

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
        (output / "checkpoints" / "000001-002" / "gradients_1.safetensors").unlink()
    accelerator.wait_for_everyone()
    before = Run(output).restore()
    skipped = before.point == ResumePoint(1) and "gradients_1.safetensors is missing" in before.said[0]

    if first:
        cut_a_file(output / "checkpoints" / "000001")
    accelerator.wait_for_everyone()
    try:
        Run(output).restore()
        none = ""
    except OutputError as error:
        none = str(error)

    sound = [random_numbers_differ, going_on, "could not be written" in full, left == ["000001", "000001-002"], skipped]
    answers = gather_object([[*sound, "can be used" in none]])
    if first:
        print(*answers, sep="\\n", flush=True)
    accelerator.wait_for_everyone()
    os._exit(0)  # gloo at times aborts a process that ends after a DDP backward pass, with nothing but torch in it

main()
"""


@pytest.mark.slow
def test_two_processes_take_the_same_way(output, tmp_path):
    """Each has random numbers and gradients of its own; what goes wrong in one of them is known to both."""
    (tmp_path / "two.py").write_text(TWO)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*launcher, str(tmp_path / "two.py"), str(output)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str([True] * 6)] * 2


def asked(**recipe):
    mixture = [{"data": "a", "weight": 0.5}, {"data": "b", "weight": 0.5}]
    return {
        "source": {"checkpoint": "here", "digest": "abc"},
        "recipe": {"steps": 6, "save_every": 2, "betas": [0.9, 0.95], "eval_lengths": [], "mixture": mixture, **recipe},
    }


def test_what_does_not_touch_the_weights_may_change(output):
    begin_run(output, asked(), resume=False)
    other = asked(save_every=1, keep_checkpoints=1, tracker="none", max_loss_rise=1.0, eval_every=2, eval_lengths=[8])
    other["source"]["checkpoint"] = "there"
    begin_run(output, other, resume=True)


@pytest.mark.parametrize(
    ("recipe", "line"),
    [
        (
            {"mixture": [{"data": "a", "weight": 0.6}, {"data": "b", "weight": 0.5}]},
            "mixture.0.weight: 0.5 then, 0.6 now",
        ),
        ({"mixture": [{"data": "a", "weight": 0.5}]}, "mixture.1.data: 'b' then, absent now"),
        ({"betas": [0.9, 0.99]}, "betas: [0.9, 0.95] then, [0.9, 0.99] now"),
        ({"stages": [{"steps": 1, "save_every": 3}]}, "stages.0.steps: absent then, 1 now"),
    ],
    ids=["weight", "fewer", "list", "stage"],
)
def test_what_does_is_refused_by_name(output, recipe, line):
    begin_run(output, asked(), resume=False)
    with pytest.raises(RecipeError) as caught:
        begin_run(output, asked(**recipe), resume=True)
    assert f"  recipe.{line}" in str(caught.value).splitlines()
    assert "save_every" not in str(caught.value)
    assert yaml.safe_load((output / "run.yaml").read_text()) == asked()


def test_the_log_is_cut_back_to_the_step_whatever_its_lines_are(output):
    output.mkdir()
    log = MetricsLog(output, 0)
    for step in (1, 2, 3):
        log.write({"step": step, "loss": 1.0})
        log.write({"step": step, "ppl": 2.0})
    MetricsLog(output, ResumePoint(2, 1).step)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": step, key: value} for step in (1, 2) for key, value in (("loss", 1.0), ("ppl", 2.0))]


SPOILT = [
    b'{"step": 3, "lo',
    b"\xff\xfe",
    b'{"step": null, "loss": 1.0}',
    b"[1]",
]


def test_lines_that_are_none_of_a_run_are_left_out(output):
    output.mkdir()
    for spoilt in SPOILT:
        lines = [b'{"step": 1, "loss": 2.5}', spoilt, b'{"step": 2, "loss": 1.5}']
        (output / "metrics.jsonl").write_bytes(b"\n".join(lines))
        assert losses_until(output, 2) == {1: 2.5, 2: 1.5}
        MetricsLog(output, 1)
        assert (output / "metrics.jsonl").read_bytes() == lines[0] + b"\n"


def test_a_run_whose_settings_cannot_be_read_is_not_resumed(output):
    output.mkdir()
    for text in ("", "a word", "a: {"):
        (output / "run.yaml").write_text(text)
        with pytest.raises(OutputError) as caught:
            begin_run(output, asked(), resume=True)
        assert f"{output / 'run.yaml'} cannot be read as the settings of a run" in str(caught.value)
        assert "--output" in str(caught.value)
