"""Methods compared in memory give what the really patched checkpoints give, in whatever order."""

import importlib.metadata
from dataclasses import replace

import numpy as np
import pytest
from packaging.version import Version

from ropecli.checkpoint.opening import open_checkpoint
from ropecli.errors import PatchError
from ropecli.evaluation.comparison import compare_methods, plan_comparison, plan_varies_with_length
from ropecli.evaluation.perplexity import evaluate_perplexity
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


def close(rows, others):
    assert len(rows) == len(others)
    for row, other in zip(rows, others, strict=True):
        np.testing.assert_allclose(row.ppl, other.ppl, rtol=1e-4)
        np.testing.assert_allclose(row.document_nll, other.document_nll, rtol=1e-4)


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


def test_every_method_equals_its_patched_checkpoint(base, pairs, patched, loaded, documents):
    """In whatever order they are compared."""
    protocol = "prefix" if "llama" in base.name else "tail"
    few = replace(documents, kept=documents.kept[:2])
    plans = plan_comparison(open_checkpoint(base), specs(pairs))
    varying = {plan.spec.method.name for plan in plans if plan_varies_with_length(plan)}
    assert varying == {"dynamic", "dynamic-yarn", "longrope"}
    results = compare_methods(loaded(base), plans, few, LENGTHS, protocol=protocol)
    compared = {plan.spec.method.name: rows for plan, rows in zip(plans, results, strict=True)}
    if "llama" in base.name:
        assert compare_methods(loaded(base), plans[::-1], few, LENGTHS, protocol=protocol) == results[::-1]
    for method in WRITTEN:
        if "gemma3" in base.name and not scaling_methods()[method].rope_type and Version("5.23") > RELEASE:
            continue  # releases before it stop at longrope by layer type
        params = next(spec.params for spec in specs(pairs) if spec.method.name == method)
        folder = patched(base, method, 4.0, **params)
        close(compared[method], evaluate_perplexity(loaded(folder), few, LENGTHS, protocol=protocol))
    losses = np.array([rows[-1].document_nll for rows in compared.values()])
    for index, loss in enumerate(losses):
        others = np.abs(np.delete(losses, index, axis=0) / loss - 1)
        assert others.max(axis=1).min() > 3e-4  # close() takes less than 1e-4 for the same


@pytest.mark.parametrize("method", ["yarn", "longrope"])
def test_a_checkpoint_that_is_patched_already_is_compared_from_its_original(llama, patched, loaded, documents, method):
    params = next(spec.params for spec in specs() if spec.method.name == method)
    folder = patched(llama, method, 2.0, **params)
    wanted = [make_spec("none"), make_spec("linear", 4.0), make_spec("dynamic", 4.0)]
    from_patched = compare_methods(loaded(folder), plan_comparison(open_checkpoint(folder), wanted), documents, LENGTHS)
    from_original = compare_methods(loaded(llama), plan_comparison(open_checkpoint(llama), wanted), documents, LENGTHS)
    for rows, others in zip(from_patched, from_original, strict=True):
        close(rows, others)


def test_the_model_is_given_back_as_it_came(llama, patched, loaded, documents):
    model = loaded(patched(llama, "dynamic", 2.0))
    before = evaluate_perplexity(model, documents, LENGTHS)
    compare_methods(model, plan_comparison(open_checkpoint(llama), specs()[:2]), documents, LENGTHS)
    assert evaluate_perplexity(model, documents, LENGTHS) == before


def test_what_the_model_does_not_allow_is_refused_before_anything_is_measured(build, loaded, documents):
    folder, parts = build("smollm3", no_rope_layers=[1, 0]), []
    plans = plan_comparison(open_checkpoint(folder), [make_spec("none"), make_spec("rerope", 4.0)])
    model = loaded(folder)
    with pytest.raises(PatchError, match="do not rotate by the rotary tables"):
        compare_methods(model, plans, documents, [32], advance=lambda: parts.append(1))
    assert parts == []
    assert model.config._attn_implementation == "sdpa"
