"""The training of the level `heads`: resumed, stopped early, interrupted; and what it leaves behind."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ropecli.errors import NotFiniteError
from ropecli.training.loss import NextTokenLoss
from ropecli.tuning.heads import HeadGains
from ropecli.tuning.learning import learn
from ropecli.tuning.task import Score, TuneSettings

START = Score(100.0, 100.0, 125.0, 3)
SETTINGS: TuneSettings = {"steps": 6, "batch_size": 2, "seed": 0}


@pytest.fixture(autouse=True)
def score_every_two_steps(monkeypatch):
    monkeypatch.setattr("ropecli.tuning.learning.EVALUATE_EVERY", 2)


class Learner:
    """A model with its gains, and its scores so far."""

    def __init__(self, folder, scorer, sequences):
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.gains, self.scorer, self.sequences = HeadGains(self.model, (None,)), scorer, sequences
        self.scores = []

    def learn(self, settings=SETTINGS, snapshots=None, on_score=None):
        on_score = on_score or (lambda learned: self.scores.append(learned[:2]))
        with self.gains.live():
            return learn(
                self.model,
                self.gains.groups,
                self.sequences,
                self.scorer,
                settings,
                start=START,
                snapshots=snapshots,
                on_score=on_score,
            )

    @property
    def values(self):
        return [parameter.detach().clone() for group, _ in self.gains.groups for parameter in group]


@pytest.fixture
def learner(llama, scorer, sequences):
    return lambda folder=llama: Learner(folder, scorer(), sequences)


def same(tensors, others):
    return all(torch.equal(*pair) for pair in zip(tensors, others, strict=True))


def test_the_best_score_is_kept_and_the_model_stays_as_it_was(learner):
    run, seen = learner(), []
    weights = [parameter.detach().clone() for parameter in run.model.parameters()]
    before, _ = run.scorer.score(run.model, "before")

    def on_score(learned):
        run.scores.append(learned[:2])
        seen.extend(parameter.requires_grad or parameter.grad is not None for parameter in run.model.parameters())

    best = run.learn(on_score=on_score)
    assert not any(seen)
    assert [step for step, _ in run.scores] == [2, 4, 6]
    assert best.step > 0
    assert best.score == min((score for _, score in run.scores), key=lambda score: score.objective)
    assert best.score.objective < before.objective
    with run.gains.live():
        assert run.scorer.score(run.model, "after")[0] == best.score
    assert not any(module.training or getattr(module, "gradient_checkpointing", 0) for module in run.model.modules())
    assert same(run.model.parameters(), weights)


def test_a_resumed_run_gives_the_same_bits(learner, build, tmp_path):
    folder = build("llama", head_dim=32, attention_dropout=0.3)
    whole, interrupted, resumed = learner(folder), learner(folder), learner(folder)
    best = whole.learn(snapshots=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        interrupted.learn(snapshots=tmp_path / "state", on_score=lambda learned: learned.step < 4 or press_ctrl_c())
    torch.manual_seed(99)  # as another process would
    assert resumed.learn(snapshots=tmp_path / "state")[:2] == best[:2]
    assert resumed.scores == whole.scores
    assert same(resumed.values, whole.values)
    assert not same(resumed.values, learner(folder).values)


def press_ctrl_c():
    raise KeyboardInterrupt


def test_training_stops_without_improvement_and_keeps_the_best(learner, monkeypatch):
    run, values = learner(), []
    objectives = iter([5.0, 4.0, 4.5, 4.25, 1.0])
    monkeypatch.setattr(
        type(run.scorer), "score", lambda *arguments: (Score(value := next(objectives), 0.0, value, 3), 0.0)
    )

    def on_score(learned):
        run.scores.append(learned[:2])
        values.append(run.values)

    monkeypatch.setattr("ropecli.tuning.learning.PATIENCE", 2)
    best = run.learn({**SETTINGS, "steps": 20}, on_score=on_score)
    assert [step for step, _ in run.scores] == [2, 4, 6, 8]
    assert (best.step, best.score.objective) == (4, 4.0)
    assert same(run.values, values[1])
    assert not same(run.values, values[0])


def test_a_loss_that_is_not_finite_ends_the_training_with_the_best(learner, tmp_path, monkeypatch):
    run = learner()
    forward, calls = NextTokenLoss.forward, []

    def failing(self, *arguments):
        calls.append(1)
        return forward(self, *arguments) * (torch.nan if len(calls) > 2 else 1.0)

    monkeypatch.setattr(NextTokenLoss, "forward", failing)
    with pytest.raises(NotFiniteError, match="at step 3"):
        run.learn(snapshots=tmp_path / "state")
    saved = load_file(tmp_path / "state" / "000002" / "model.safetensors")
    assert same(run.values, [saved[f"best.{number}"] for number in range(len(run.values))])
