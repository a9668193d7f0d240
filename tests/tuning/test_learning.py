"""Learning a few numbers on calibration sequences: resumed, stopped early, interrupted; and what it leaves behind."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ropecli.errors import NotFiniteError
from ropecli.training.loss import NextTokenLoss
from ropecli.tuning.learners import HeadGains
from ropecli.tuning.learning import learn
from ropecli.tuning.task import Score
from ropecli.tuning.task import TuneSettings

START = Score(100.0, 100.0, 125.0, 3)
SETTINGS = TuneSettings(steps=6, batch_size=2, evaluate_every=2)


class Learner:
    """A model with its gains, and the scores on the way."""

    def __init__(self, folder, evaluator, sequences):
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.gains, self.evaluator, self.sequences = HeadGains(self.model, (None,)), evaluator, sequences
        self.scores = []

    def learn(self, settings=SETTINGS, start=START, snapshots=None, **others):
        named = {"on_score": lambda learned: self.scores.append(learned[:2]), **others}
        with self.gains.live():
            return learn(
                self.model,
                self.gains.groups,
                self.sequences,
                self.evaluator,
                settings,
                start=start,
                snapshots=snapshots,
                **named,
            )

    @property
    def values(self):
        return [parameter.detach().clone() for group, _ in self.gains.groups for parameter in group]


@pytest.fixture
def learner(llama, evaluator, sequences):
    return lambda folder=llama, by=None, on=sequences: Learner(folder, by or evaluator(), on)


def checkpointing(model):
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def same(some, others):
    return all(torch.equal(*pair) for pair in zip(some, others, strict=True))


def scores(*objectives):
    """These scores, one after the other."""
    left = [Score(value, 0.0, value, 3) for value in objectives]
    return lambda model, part, count=None: (left.pop(0), 0.0)


def stop_after(steps):
    """A Ctrl-C after so many scores."""
    seen = []

    def look(learned):
        seen.append(learned.step)
        if len(seen) == steps:
            raise KeyboardInterrupt

    return look


def test_it_learns_what_the_judge_likes_better(learner):
    one = learner()
    before, _ = one.evaluator.score(one.model, "before")
    best = one.learn()
    assert [step for step, _ in one.scores] == [2, 4, 6]
    assert best.step > 0
    assert best.score == min((score for _, score in one.scores), key=lambda score: score.objective)
    assert best.score.objective < before.objective
    with one.gains.live():
        assert one.evaluator.score(one.model, "after")[0] == best.score  # the parameters are left at it


def test_a_resumed_run_gives_the_same_to_the_last_bit(learner, build, tmp_path):
    folder = build("llama", head_dim=32, attention_dropout=0.3)
    whole, parted, again = learner(folder), learner(folder), learner(folder)
    best = whole.learn(snapshots=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        parted.learn(snapshots=tmp_path / "state", on_score=stop_after(2))
    torch.manual_seed(99)  # another process draws otherwise
    assert again.learn(snapshots=tmp_path / "state")[:2] == best[:2]
    assert again.scores == whole.scores
    assert same(again.values, whole.values)
    assert not same(again.values, learner(folder).values)


def test_patience_ends_it_and_the_best_look_is_kept(learner, monkeypatch):
    one, until, there = learner(), learner(), []
    settings = replace(SETTINGS, steps=20, patience=2)
    monkeypatch.setattr(type(one.evaluator), "score", staticmethod(scores(5.0, 4.0, 4.5, 4.25, 1.0)))
    best = one.learn(settings)
    assert [step for step, _ in one.scores] == [2, 4, 6, 8]
    assert (best.step, best.score.objective) == (4, 4.0)
    monkeypatch.setattr(type(one.evaluator), "score", staticmethod(scores(5.0, 4.0)))
    with pytest.raises(KeyboardInterrupt):
        until.learn(settings, on_score=lambda learned: there.append(until.values) or learned.step < 4 or press_ctrl_c())
    assert same(one.values, there[1])
    assert not same(one.values, there[0])


def press_ctrl_c():
    raise KeyboardInterrupt


def test_a_number_that_is_none_ends_it_with_the_best(learner, tmp_path, monkeypatch):
    one = learner()
    plain, calls = NextTokenLoss.forward, []

    def forward(self, *arguments):
        calls.append(1)
        return plain(self, *arguments) * (torch.nan if len(calls) > 2 else 1.0)

    monkeypatch.setattr(NextTokenLoss, "forward", forward)
    with pytest.raises(NotFiniteError, match="at step 3"):
        one.learn(snapshots=tmp_path / "state")
    saved = load_file(tmp_path / "state" / "000002" / "model.safetensors")
    assert same(one.values, [saved[f"best.{number}"] for number in range(len(one.values))])


def test_the_weights_get_no_gradient_and_stay(learner):
    one = learner()
    weights = [parameter.detach().clone() for parameter in one.model.parameters()]
    seen = []

    def look(learned):
        seen.append(any(parameter.requires_grad for parameter in one.model.parameters()))
        seen.append(any(parameter.grad is not None for parameter in one.model.parameters()))
        seen.append(not checkpointing(one.model))

    one.learn(on_score=look)
    assert seen == [False] * 9
    assert not any(module.training for module in one.model.modules())
    assert same(one.model.parameters(), weights)
    assert not checkpointing(one.model)
