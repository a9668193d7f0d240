"""Every level on a tiny model, from the search to the checkpoint that stock transformers loads."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from ropecli.attention.patching import live_patch, patch_to
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.checkpoint.patch_plan import make_plan
from ropecli.errors import NotFiniteError
from ropecli.evaluation.driver import score_samples
from ropecli.evaluation.protocols import Protocol
from ropecli.evaluation.readers.live import LiveReader
from ropecli.evaluation.tasks.perplexity import Perplexity
from ropecli.live.rotary import unpatched_after
from ropecli.resume import read_records
from ropecli.scaling.spec import make_spec
from ropecli.tuning.calibration import PointScorer
from ropecli.tuning.folding import difference, logits_of
from ropecli.tuning.learning import Learned
from ropecli.tuning.procedure import write_tuned
from ropecli.tuning.search import planned_tokens

SETTINGS = {
    "grid": {"points": 4},
    "heads": {"points": 2},
    "search": {"population": 4, "iterations": 2},
}


@pytest.fixture(autouse=True)
def small_generations(monkeypatch):
    for name in ("MUTATIONS", "CROSSOVERS", "PARENTS", "DOCUMENTS"):
        monkeypatch.setattr(f"ropecli.tuning.search.{name}", 2)


def state_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def objective_of(run, spec):
    """The objective of the checkpoint with this scaling, on the scorer's documents."""
    model = AutoModelForCausalLM.from_pretrained(run.checkpoint.folder).eval()
    live_patch(model, make_plan(run.checkpoint, spec).positions.ropes)
    task = Perplexity(run.scorer.documents, [64, 128], Protocol("tail", targets=32))
    short, target = task.cells(score_samples(task, LiveReader(model)))
    return target.value + 0.25 * short.value


@pytest.mark.parametrize("level", SETTINGS)
def test_the_written_checkpoint_is_the_tuned_model(llama, make_run, tmp_path, level):
    points = []
    run = make_run(llama, level=level, on_point=points.append, **SETTINGS[level])
    before = state_of(run.model)
    tuned = run.tune()
    assert tuned.report.score.objective <= tuned.report.start.objective
    specs = {"base": make_spec("none"), "untuned": make_spec("yarn", 2.0), "start": tuned.plan.spec}
    for name, spec in specs.items():
        assert getattr(tuned.report, name).objective == pytest.approx(objective_of(run, spec), rel=1e-6)
    assert {point.level for point in points} == {level} | ({"grid"} if level == "heads" else set())
    assert all(point.seconds > 0 for point in points)
    after = state_of(run.model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    modules = {"q_proj", "input_layernorm", "post_attention_layernorm", "norm"} if level == "heads" else set()
    assert {name.split(".")[-2] for name in changed} == modules
    assert set(tuned.folded.changed) == changed
    assert (tuned.report.step > 0) == (level == "heads")
    assert tuned.report.learned == (2 * 2 * 2 * 16 + 1 + 5 * 64 if level == "heads" else 0)
    write_tuned(tuned, tmp_path / "tuned")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned").eval()
    assert difference(logits_of(loaded, run.probe), logits_of(run.model, run.probe)) < 1e-5


def test_without_improvement_the_weights_stay(llama, make_run, tmp_path, monkeypatch):
    for rate, value in {"GAIN_RATE": 1.0, "NORM_RATE": 0.0}.items():  # smaller norms alone would improve random weights
        monkeypatch.setattr(f"ropecli.tuning.heads.{rate}", value)
    run = make_run(llama, level="heads", points=1)
    before = state_of(run.model)
    tuned = run.tune()
    assert (tuned.report.step, tuned.report.score, tuned.folded.changed) == (0, tuned.report.start, {})
    assert all(torch.equal(value, before[name]) for name, value in state_of(run.model).items())
    write_tuned(tuned, tmp_path / "tuned")
    assert (tmp_path / "tuned" / "model.safetensors").samefile(llama / "model.safetensors")


def test_the_grid_finds_the_best_of_several_methods(llama, make_run):
    """By brute force: every point on all documents is measured again."""
    points = []
    run = make_run(llama, level="grid", methods=("yarn", "ntk", "abf", "llama3"), points=12, on_point=points.append)
    with unpatched_after(run.model):
        tuned = run.tune()
    assert {point.method for point in points} == {"yarn", "ntk", "abf", "llama3"}
    last = [point for point in points if point.score.documents == 3]
    objectives = [objective_of(run, make_spec(point.method, 2.0, point.params)) for point in last]
    assert [point.score.objective for point in last] == pytest.approx(objectives, rel=1e-6)
    assert tuned.report.score.objective == pytest.approx(min(objectives), rel=1e-6)
    assert min(objectives) <= objective_of(run, make_spec("yarn", 2.0))


def test_no_scaling_reads_a_document_twice(llama, make_run, tmp_path):
    points = []
    make_run(llama, level="grid", points=4, on_point=points.append).tune(tmp_path)
    read = [(part, *key) for part, key, _ in read_records(tmp_path / "samples-0.jsonl") if key != ["reader"]]
    assert len(set(read)) == len(read)
    specs = [make_spec("none"), *(make_spec("yarn", 2.0, point.params) for point in points)]
    assert {part for part, *_ in read} == {str(spec) for spec in specs}


@pytest.mark.parametrize(
    ("options", "trained"),
    [
        ({"level": "grid", "points": 24}, 0),
        ({"level": "heads", "points": 8, "steps": 6, "batch_size": 4}, 6 * 4 * 128),
        ({"level": "search", **SETTINGS["search"]}, 0),
    ],
)
def test_planned_tokens_are_those_that_a_run_reads(llama, make_run, monkeypatch, options, trained):
    run, read = make_run(llama, **options), []
    run.model.model.layers[0].register_forward_hook(lambda layer, inputs, output: read.append(inputs[0].shape[1]))
    monkeypatch.setattr("ropecli.tuning.procedure.learn", lambda *given, start, **more: Learned(0, start))
    run.tune()
    planned = planned_tokens(run.task.settings, 3, 64, 128)
    assert planned == (pytest.approx(sum(read), rel=0.25), trained)


@pytest.mark.parametrize("level", ["search", "heads"])
def test_a_resumed_run_measures_nothing_again(llama, make_run, monkeypatch, tmp_path, level):
    points, again = [], []
    tuned = make_run(llama, level=level, on_point=points.append, **SETTINGS[level]).tune(tmp_path)

    def refuse(*arguments):
        pytest.fail("a document was read again")

    monkeypatch.setattr(Perplexity, "score", refuse)
    resumed = make_run(llama, level=level, on_point=again.append, **SETTINGS[level]).tune(tmp_path)
    assert again == points  # the seconds too
    assert resumed.report == tuned.report
    assert all(torch.equal(value, tuned.folded.changed[name]) for name, value in resumed.folded.changed.items())


def test_only_layers_that_see_the_whole_context_are_tuned(build, make_run):
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16, "head_dim": 32}
    tuned = make_run(build("gemma3_text", **layers), level="heads", points=1).tune()
    assert tuple(tuned.plan.written) == ("full_attention",)
    assert [layer.name for layer in tuned.report.gains] == ["model.layers.1.self_attn.q_norm"]
    assert tuned.report.gains[0].phase == []
    assert np.shape(tuned.report.gains[0].log_gain) == (1, 16)


def test_a_patched_checkpoint_is_tuned_like_its_original(llama, make_run, tmp_path):
    patch_to(make_plan(open_checkpoint(llama), make_spec("yarn", 4.0)), tmp_path / "patched")
    tuned, original = (make_run(folder, level="grid", points=2).tune() for folder in (tmp_path / "patched", llama))
    assert tuned.plan.spec == original.plan.spec
    np.testing.assert_array_equal(
        tuned.plan.positions.ropes[None].inv_freq, original.plan.positions.ropes[None].inv_freq
    )
    assert tuned.report.score.objective == pytest.approx(original.report.score.objective, rel=1e-6)


def test_points_that_overflow_have_an_infinite_loss(llama, make_run, monkeypatch):
    scorer_score, points = PointScorer.score, []

    def score(self, model, part, count=None, name=""):
        if "beta_fast" in part:
            raise NotFiniteError("too much")
        return scorer_score(self, model, part, count)

    monkeypatch.setattr(PointScorer, "score", score)
    tuned = make_run(llama, level="grid", points=4, on_point=points.append).tune()
    assert tuned.plan.spec.params == {}
    assert {point.score.objective == float("inf") for point in points} == {True, False}
