"""Every level on a tiny model, from the search to the checkpoint that stock transformers loads."""

import numpy as np
import pytest
import torch
from ropecli.evaluation.perplexity import evaluate_perplexity
from transformers import AutoModelForCausalLM

from ropecli.attention.patching import live_patch, patch_to
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.checkpoint.patch_plan import make_plan
from ropecli.errors import NotFiniteError
from ropecli.evaluation.protocols import Protocol
from ropecli.live.rotary import unpatched_after
from ropecli.scaling.spec import make_spec
from ropecli.tuning.calibration import Evaluator
from ropecli.tuning.folding import difference, logits_of
from ropecli.tuning.procedure import write_tuned
from ropecli.tuning.tune_report import Point

FEW = {"population": 4, "iterations": 2, "mutations": 2, "crossovers": 2, "parents": 2, "documents": 2}
SETTINGS = {
    "grid": {"points": 4},
    "heads": {"points": 2},
    "lora": {"points": 2, "rank": 2},
    "search": {f"search_{name}": value for name, value in FEW.items()},
}


def state_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def plain_objective(run, spec):
    """Of the checkpoint as it is, by the evaluator's documents."""
    model = AutoModelForCausalLM.from_pretrained(run.checkpoint.folder).eval()
    live_patch(model, make_plan(run.checkpoint, spec).ropes)
    rows = evaluate_perplexity(model, run.evaluator.documents, [64, 128], protocol=Protocol("tail", targets=32))
    return rows[1].nll + 0.25 * rows[0].nll


@pytest.mark.parametrize("level", SETTINGS)
def test_every_level_ends_as_a_checkpoint_that_is_what_was_tuned(llama, make_run, tmp_path, level):
    points: list[Point] = []
    run = make_run(llama, level=level, on_point=points.append, **SETTINGS[level])
    before = state_of(run.model)
    tuned = run.tune()
    assert tuned.report.score.objective <= tuned.report.begun.objective
    assert tuned.report.begun.objective == pytest.approx(plain_objective(run, tuned.plan.spec), rel=1e-6)
    assert {point.level for point in points} == {level} | ({"grid"} if level in ("heads", "lora") else set())
    assert all(point.seconds > 0 for point in points)
    after = state_of(run.model)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    norms = {"input_layernorm", "post_attention_layernorm", "norm"}
    kinds = {"heads": {"q_proj", *norms}, "lora": {"q_proj", "k_proj"}}.get(level, set())
    assert {name.split(".")[-2] for name in changed} == kinds
    assert set(tuned.folded.changed) == changed
    assert (tuned.report.step > 0) == bool(kinds)
    assert tuned.report.learned == {"heads": 2 * 2 * 2 * 16 + 1 + 5 * 64, "lora": 2 * 2 * (64 + 64 + 64 + 32)}.get(
        level, 0
    )
    write_tuned(tuned, tmp_path / "tuned")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned").eval()
    assert difference(logits_of(loaded, run.probe), logits_of(run.model, run.probe)) < 1e-5


def test_lora_that_is_interrupted_leaves_the_model_itself(llama, make_run):
    def stop(point):
        if point.level == "lora":
            raise KeyboardInterrupt

    run = make_run(llama, level="lora", points=1, on_point=stop)
    names = [name for name, _ in run.model.named_modules()]
    before = state_of(run.model)
    with pytest.raises(KeyboardInterrupt):
        run.tune()
    assert [name for name, _ in run.model.named_modules()] == names
    assert all(torch.equal(value, before[name]) for name, value in state_of(run.model).items())


def test_what_nothing_improves_is_left_alone(llama, make_run, tmp_path, monkeypatch):
    """Rates that only do harm: the start stays the best, and no weight is written."""
    monkeypatch.setattr("ropecli.tuning.learners.LORA_RATE", 1.0)
    run = make_run(llama, level="lora", points=1)
    before = state_of(run.model)
    tuned = run.tune()
    assert (tuned.report.step, tuned.report.score, tuned.folded.changed) == (0, tuned.report.begun, {})
    assert all(torch.equal(value, before[name]) for name, value in state_of(run.model).items())
    write_tuned(tuned, tmp_path / "tuned")
    assert (tmp_path / "tuned" / "model.safetensors").stat().st_ino == (llama / "model.safetensors").stat().st_ino


def test_the_grid_finds_the_best_of_several_methods(llama, make_run):
    """By brute force: every point that it names, measured anew on all documents."""
    points = []
    run = make_run(llama, level="grid", methods=("yarn", "ntk", "abf", "llama3"), points=12, on_point=points.append)
    with unpatched_after(run.model):
        tuned = run.tune()
    assert {point.method for point in points} == {"yarn", "ntk", "abf", "llama3"}
    first = [point for point in points if point.score.documents == 2]
    assert len({str(point.params) + point.method for point in first}) == 10  # ntk has no range: its own constant alone
    last = [point for point in points if point.score.documents == 3]
    found = {point.label: plain_objective(run, make_spec(point.method, 2.0, point.params)) for point in last}
    for point in last:
        assert point.score.objective == pytest.approx(found[point.label], rel=1e-6)
    assert tuned.report.score.objective == pytest.approx(min(found.values()), rel=1e-6)
    assert min(found.values()) <= plain_objective(run, make_spec("yarn", 2.0))


@pytest.mark.parametrize("level", ["search", "lora"])
def test_what_was_measured_is_not_measured_again(llama, make_run, monkeypatch, tmp_path, level):
    points, again = [], []
    one = make_run(llama, level=level, on_point=points.append, **SETTINGS[level]).tune(tmp_path)

    def refuse(*arguments):
        pytest.fail("a document was read again")

    monkeypatch.setattr("ropecli.evaluation.perplexity._Meter.measure", refuse)
    other = make_run(llama, level=level, on_point=again.append, **SETTINGS[level]).tune(tmp_path)
    assert other.plan.spec == one.plan.spec
    assert again == points  # the seconds too
    assert all(torch.equal(value, one.folded.changed[name]) for name, value in other.folded.changed.items())
    assert other.report == one.report


def test_of_several_kinds_of_layers_those_that_see_everything_are_tuned(build, make_run):
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16, "head_dim": 32}
    run = make_run(build("gemma3_text", **kinds), level="heads", points=1)
    tuned = run.tune()
    assert tuned.plan.scaled == ("full_attention",)
    assert [layer.name for layer in tuned.report.gains] == ["model.layers.1.self_attn.q_norm"]
    assert tuned.report.gains[0].phase == []
    assert np.shape(tuned.report.gains[0].log_gain) == (1, 16)


def test_a_checkpoint_that_was_scaled_already_is_planned_from_its_origin(llama, make_run, tmp_path):
    patch_to(make_plan(open_checkpoint(llama), make_spec("yarn", 4.0)), tmp_path / "patched")
    tuned = make_run(tmp_path / "patched", level="grid", points=2).tune()
    plain = make_run(llama, level="grid", points=2).tune()
    assert tuned.plan.spec == plain.plan.spec
    np.testing.assert_array_equal(tuned.plan.ropes[None].inv_freq, plain.plan.ropes[None].inv_freq)
    assert tuned.report.score.objective == pytest.approx(plain.report.score.objective, rel=1e-6)


def test_points_that_overflow_are_infinitely_bad(llama, make_run, monkeypatch):
    plain, points = Evaluator.score, []

    def score(self, model, part, count=None):
        if part.startswith("grid") and "beta_fast" in part:
            raise NotFiniteError("too much")
        return plain(self, model, part, count)

    monkeypatch.setattr(Evaluator, "score", score)
    tuned = make_run(llama, level="grid", points=4, on_point=points.append).tune()
    assert tuned.plan.spec.params == {}
    assert {point.score.objective == float("inf") for point in points} == {True, False}
