"""Methods compared in memory give what the really patched checkpoints give, in whatever order."""

import importlib.metadata
from dataclasses import replace

import numpy as np
import pytest
from packaging.version import Version

from ropecli.checkpoint.opening import Checkpoint, open_checkpoint
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
BY_LAYER_TYPE = pytest.mark.transformers("5.9", "yarn by layer type is not read")
RELEASE = Version(importlib.metadata.version("transformers"))


# string alone cannot extend the context; unscaled is reported as none
METHODS = [name for name in scaling_methods() if name not in ("string", "unscaled")]


def specs(pairs=16):
    """Every method that can extend the context, each by a factor of 4; longrope with two lists as well as with one."""
    long, short = np.linspace(1, 6, pairs).tolist(), np.linspace(1, 1.5, pairs).tolist()
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
    """compare(folder, specs, ...) -> the cells of each scaling, applied in memory; None: as it is."""

    def measured(folder, specs, few=documents, protocol="prefix"):
        checkpoint, task = open_checkpoint(folder), Perplexity(few, LENGTHS, protocol)
        plans = [make_plan(checkpoint, spec, in_memory=True) if spec else None for spec in specs]
        jobs = [Job(Subject(checkpoint, plan), task, tokenizer) for plan in plans]
        return [report.cells for report in make_reports(jobs, LiveReaderFactory({"device": "cpu"}))]

    return measured


@pytest.fixture(scope="module", params=["llama", "gpt_neox", pytest.param("gemma3_text", marks=BY_LAYER_TYPE)])
def base(request, llama, build):
    """A plain model, one that turns a part of each head, and one with layers that see a sliding window alone."""
    match request.param:
        case "gpt_neox":
            return build("gpt_neox", rotary_pct=0.5, rotary_emb_base=20000.0)
        case "gemma3_text":
            layers = ["sliding_attention", "full_attention"]
            return build("gemma3_text", head_dim=32, sliding_window=32, layer_types=layers, query_pre_attn_scalar=4)
    return llama


@pytest.fixture(scope="module")
def pairs(base):
    return 8 if "gpt_neox" in base.name else 16


WRITTEN = [
    name for name in METHODS if scaling_methods()[name].rope_type or not scaling_methods()[name].depends_on_length
]


def test_every_method_equals_its_patched_checkpoint(base, pairs, patched, loaded, documents, evaluate, compare):
    """In whatever order they are compared."""
    protocol = "prefix" if "llama" in base.name else "tail"
    few = replace(documents, kept=documents.kept[:2])
    results = compare(base, specs(pairs), few, protocol)
    by_method = dict(zip(METHODS, results, strict=True))
    if "llama" in base.name:
        assert compare(base, [None, *specs(pairs)[:3:-1], None], few, protocol)[1:-1] == results[:3:-1]
    for method in WRITTEN:
        if "gemma3" in base.name and not scaling_methods()[method].rope_type and Version("5.23") > RELEASE:
            continue  # releases before it stop at longrope by layer type
        params = next(spec.params for spec in specs(pairs) if spec.method.name == method)
        folder = patched(base, method, 4.0, **params)
        assert_close(by_method[method], evaluate(loaded(folder), few, LENGTHS, protocol))
    losses = np.array([cells[-1].sums for cells in results])
    for index, loss in enumerate(losses):
        others = np.abs(np.delete(losses, index, axis=0) / loss - 1)
        assert others.max(axis=1).min() > 3e-4  # assert_close takes less than 1e-4 for the same


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


def test_a_report_has_the_makers_pretraining_length(llama):
    """Llama 4's config.json names 8,192 tokens, which its frequencies are computed from."""
    scaling = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
    config = {"model_type": "llama4_text", "rope_theta": 5e5, "head_dim": 128, "max_position_embeddings": 10485760}
    config |= {"hidden_size": 5120, "vocab_size": 202048}
    config["rope_scaling"] = {**scaling, "original_max_position_embeddings": 8192}
    subject = Subject(Checkpoint("model", llama, config))
    assert subject.report_fields()["original_max_position_embeddings"] == 262144


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
        assert reader.properties()["dtype"] == dtype
    # on a CPU without it, a run does not resume
    assert factory.request()["dtype"] == ("float32" if exact or options else "bfloat16")
