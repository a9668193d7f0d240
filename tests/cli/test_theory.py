"""ropecli theory: the report has the computed numbers, and the terminal shows numbers alone."""

import json
import math
import re

import pytest

from ropecli.analysis.summary import summarize
from ropecli.checkpoint.inspection import compared_ropes
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.scaling.spec import make_spec

LLAMA2 = {"model_type": "llama", "head_dim": 128, "max_position_embeddings": 4096, "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.fixture
def folder(tmp_path):
    """folder(key=value, ...) -> a checkpoint with only a config.json."""

    def write(**values):
        where = tmp_path / f"checkpoint-{len(list(tmp_path.iterdir()))}"
        where.mkdir()
        (where / "config.json").write_text(json.dumps({**LLAMA2, **values}))
        return where

    return write


@pytest.fixture
def theory(ropecli):
    """theory(checkpoint, ...) -> the JSON report, strictly valid JSON."""

    def call(*arguments) -> dict:
        out = ropecli("theory", *arguments, "--json").succeeds().out
        return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))

    return call


def as_json(value):
    """What becomes of infinities, NaN and tuples."""
    if isinstance(value, dict):
        return {key: as_json(one) for key, one in value.items()}
    if isinstance(value, list):
        return [as_json(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def test_the_report_is_what_is_computed(theory):
    report = theory("demo", "--methods", "yarn,nope,rerope", "--factor", 8)
    specs = [make_spec(name, 8.0) for name in ("yarn", "nope", "rerope")]
    ropes, _, findings = compared_ropes(open_checkpoint("demo"), specs)
    assert list(ropes) == ["pretrained", "yarn ×8", "nope ×8", "rerope ×8"]
    for found, (name, rope) in zip(report["ropes"], ropes.items(), strict=True):
        method = rope.spec.method
        form = {"name": name, "g": method.g, "h": method.h, "interpolation": method.interpolation}
        assert found == as_json({**form, **summarize(rope, 2048)})
    assert (report["original_max_position_embeddings"], report["target_length"]) == (256, 2048)
    assert report["findings"] == [finding.as_json() for finding in findings]


def test_without_a_method_it_is_the_checkpoint_as_it_is(theory, folder):
    def names(report):
        return [rope["name"] for rope in report["ropes"]]

    assert names(theory(folder())) == ["pretrained"]
    scaled = folder(rope_scaling=YARN)
    report = theory(scaled)
    assert names(report) == ["pretrained", "yarn ×4, as it is"]
    assert (report["original_max_position_embeddings"], report["target_length"]) == (1024, 4096)
    assert theory(scaled, "--methods", "as-is") == report
    both = theory(scaled, "--methods", "linear,as-is", "--factor", 8)
    assert names(both) == ["pretrained", "yarn ×4, as it is", "linear ×8"]
    assert both["target_length"] == 8192


STILL = [1.0] * 8 + [1e29] * 8
STRANGE = {
    "a length of one token": {"max_position_embeddings": 1},
    "one pair": {"head_dim": 2},
    "pairs that stand still": {
        "rope_scaling": {"rope_type": "longrope", "factor": 2.0, "short_factor": STILL, "long_factor": STILL}
    },
}


@pytest.mark.parametrize("values", STRANGE.values(), ids=STRANGE)
def test_strange_geometries_give_numbers(values, theory, ropecli, folder):
    checkpoint = folder(**{"head_dim": 32, "max_position_embeddings": 256, **values})
    for method in ([], ["--methods", "linear,rerope", "--factor", 8]):
        assert theory(checkpoint, *method)["ropes"][0]["name"] == "pretrained"
        shown = ropecli("theory", checkpoint, *method).succeeds().printed.replace(str(checkpoint), "")
        assert not re.search(r"\b(nan|inf|None)\b", shown)
