"""A subject: a checkpoint, as it is or with a method in memory. tests/live/test_stock_equality.py has the logits."""

import numpy as np
import pytest

from ropecli.checkpoint.opening import open_checkpoint
from ropecli.checkpoint.patch_plan import make_plan
from ropecli.errors import PatchError
from ropecli.evaluation import subject as subject_module
from ropecli.evaluation.driver import Job, make_reports
from ropecli.evaluation.subject import LiveReaderFactory, Subject
from ropecli.evaluation.tasks.perplexity import Perplexity
from ropecli.live.rotary import unpatched_after
from ropecli.scaling.registry import scaling_methods
from ropecli.scaling.spec import make_spec

LENGTHS = [24, 65, 200]
# string alone cannot extend the context; unscaled is reported as none
METHODS = [name for name in scaling_methods() if name not in ("string", "unscaled")]


def specs():
    """Every method that can extend the context, each by a factor of 4; longrope with two lists as well as with one."""
    long, short = np.linspace(1, 6, 16).tolist(), np.linspace(1, 1.5, 16).tolist()
    params = {
        "longrope": {"long_factor": long, "short_factor": short},
        "yarn": {"beta_fast": 8.0},
        "abf": {"rope_theta": 500_000.0},
        "custom": {"factors": long[::-1]},
        "p-rope": {"p": 0.25},
    }
    return [make_spec(name, 4.0, params.get(name, {})) for name in METHODS]


def assert_close(cells, others):
    for cell, other in zip(cells, others, strict=True):
        np.testing.assert_allclose(cell.sums, other.sums, rtol=1e-4)


@pytest.fixture(scope="module")
def compare(documents, tokenizer):
    """compare(folder, specs) -> the cells of each scaling, applied in memory."""

    def measured(folder, specs):
        checkpoint, task = open_checkpoint(folder), Perplexity(documents, LENGTHS, "prefix")
        plans = [make_plan(checkpoint, spec, in_memory=True) for spec in specs]
        jobs = [Job(Subject(checkpoint, plan), task, tokenizer) for plan in plans]
        return [report.cells for report in make_reports(jobs, LiveReaderFactory({"device": "cpu"}))]

    return measured


def test_methods_whose_frequencies_follow_the_length_are_known(llama, loaded):
    checkpoint, model, follow = open_checkpoint(llama), loaded(llama), set()
    for spec in specs():
        with unpatched_after(model):
            if Subject(checkpoint, make_plan(checkpoint, spec, in_memory=True)).patch(model):
                follow.add(spec.method.name)
    assert follow == {"dynamic", "dynamic-yarn", "longrope"}


def test_a_patched_checkpoint_is_compared_from_its_original(llama, patched, compare):
    chosen = [make_spec("none"), make_spec("linear", 4.0), make_spec("dynamic", 4.0)]
    from_patched, from_original = compare(patched(llama, "yarn", 2.0), chosen), compare(llama, chosen)
    for cells, others in zip(from_patched, from_original, strict=True):
        assert_close(cells, others)


def test_unsupported_methods_are_refused_before_anything_is_measured(build, compare, monkeypatch):
    folder = build("smollm3", no_rope_layers=[1, 0])
    monkeypatch.setattr("ropecli.evaluation.driver.score_samples", pytest.fail)
    with pytest.raises(PatchError, match="do not rotate by the rotary tables"):
        compare(folder, [make_spec("none"), make_spec("rerope", 4.0)])


@pytest.mark.parametrize(
    ("stored", "options", "exact", "large", "dtype"),
    [
        ("bfloat16", {}, False, 0, "bfloat16"),
        ("float16", {}, False, 0, "bfloat16"),
        ("float32", {}, False, 0, "float32"),
        ("bfloat16", {"dtype": "float32"}, False, 0, "float32"),
        ("bfloat16", {}, True, 0, "float32"),
        ("bfloat16", {}, False, 50_000_000, "float32"),
    ],
)
def test_a_cpu_with_bfloat16_arithmetic_uses_it(
    llama, edited, tokenizer, monkeypatch, stored, options, exact, large, dtype
):
    """For models that are stored in half precision and large."""
    monkeypatch.setattr(subject_module, "computes_bfloat16", lambda: True)
    monkeypatch.setattr(subject_module, "_LARGE", large)
    factory = LiveReaderFactory({"device": "cpu", **options}, exact=exact)
    with factory.open(Subject(open_checkpoint(edited(llama, dtype=stored))), tokenizer) as reader:
        assert reader.dtype_and_device()[0] == dtype
    # on a CPU without it, a run does not resume
    assert factory.request()["dtype"] == ("float32" if exact or options else "by checkpoint")
