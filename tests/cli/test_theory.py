"""ropecli theory: the report has the computed numbers, and the terminal shows all of them at any width."""

import json
import math
import re

import pytest

from ropecli.analysis.base_bound import smallest_base
from ropecli.analysis.summary import summarize
from ropecli.checkpoint.inspection import make_study
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.cli import terminal
from ropecli.scaling.spec import make_spec

LLAMA2 = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.fixture
def folder(tmp_path):
    """folder(config, key=value, ...) -> a checkpoint with only a config.json."""

    def write(config=LLAMA2, **values):
        where = tmp_path / f"checkpoint-{len(list(tmp_path.iterdir()))}"
        where.mkdir()
        (where / "config.json").write_text(json.dumps({**config, **values}))
        return where

    return write


@pytest.fixture
def theory(ropecli):
    """theory(checkpoint, ...) -> the JSON report, strictly valid JSON."""

    def call(*arguments) -> dict:
        outcome = ropecli("theory", *arguments, "--json")
        assert outcome.code == 0, outcome.err
        return json.loads(outcome.out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))

    return call


def text(outcome) -> str:
    assert outcome.code == 0, outcome.err
    return " ".join(outcome.out.split())


def rows_of(outcome) -> dict[str, list[str]]:
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in outcome.out.splitlines() if "│" in line]
    return {cell[0]: cell[1:] for cell in cells}


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
    study = make_study(open_checkpoint("demo"), specs)
    assert [rope["name"] for rope in report["ropes"]] == ["pretrained", "yarn ×8", "nope ×8", "rerope ×8"]
    for found, (name, rope) in zip(report["ropes"], study.ropes.items(), strict=True):
        method = rope.spec.method
        form = {"name": name, "g": method.g, "h": method.h, "interpolation": method.interpolation}
        assert found == as_json({**form, **summarize(rope, 2048)})
    assert report["smallest_base"] == smallest_base(study.geometry, 2048)
    assert (report["original_max_position_embeddings"], report["target_length"]) == (256, 2048)
    assert report["checkpoint"] == "demo"
    assert report["warnings"] == list(study.warnings)


def test_without_a_method_it_is_the_checkpoint_as_it_is(theory, folder):
    assert [rope["name"] for rope in theory(folder())["ropes"]] == ["pretrained"]
    scaled = folder(rope_scaling=YARN)
    report = theory(scaled)
    assert [rope["name"] for rope in report["ropes"]] == ["pretrained", "yarn ×4, as it is"]
    assert (report["original_max_position_embeddings"], report["target_length"]) == (1024, 4096)
    assert theory(scaled, "--methods", "as-is") == report
    both = theory(scaled, "--methods", "linear,as-is", "--factor", 8)
    assert [rope["name"] for rope in both["ropes"]] == ["pretrained", "yarn ×4, as it is", "linear ×8"]
    assert both["target_length"] == 8192


def test_the_numbers_stand_beside_their_names(ropecli, theory, monkeypatch):
    monkeypatch.setattr(terminal.out, "width", 80)
    outcome = ropecli("theory", "demo", "--methods", "yarn", "--factor", 8)
    rows = rows_of(outcome)
    pretrained, yarn = theory("demo", "--methods", "yarn", "--factor", 8)["ropes"]
    assert rows["factor s"] == ["1", "8"]
    assert rows["attention factor"] == ["1", f"{1 + 0.1 * math.log(8):.6g}"]
    assert rows["longest wavelength, tokens"] == ["35,333", "282,664"]
    assert rows["pairs fully rotated by then"] == ["75%", "75%"]
    assert rows["critical dimension"] == ["14 of 32", "14 of 32"]
    for name, key in (
        ("first negative score, tokens", "first_negative_score"),
        ("first rise of the score, tokens", "first_rise"),
    ):
        assert rows[name] == [f"{rope[key]:,}" for rope in (pretrained, yarn)]
    for name, key in (
        ("granularity (mean sine)", "granularity"),
        ("distance d to pretrained images", "distance_to_old_images"),
    ):
        assert rows[name] == [f"{rope[key]:.4g}" for rope in (pretrained, yarn)]
    assert rows["its exact limit"][1] == "", "yarn's frequencies are not powers of a base"
    assert "largest distance seen, tokens" not in rows
    assert rows["32 or more"] == ["0", "6.283", "1"]
    assert rows["below 1"] == ["7 to 15", "353.3 to 35,333", "0.125"]
    assert "scaling of a position m" in outcome.out
    last = yarn["decay"][-1]
    assert rows["2,047"] == [f"{last[key]:.3f}" for key in ("score", "magnitude", "estimate", "sinusoidal")]


LISTS = ("short_factor", "long_factor")
STILL = [1.0] * 8 + [1e29] * 8
HOSTILE = {
    "a window of one token": {"max_position_embeddings": 1},
    "a huge window": {"max_position_embeddings": 10**9},
    "one pair": {"head_dim": 2},
    "pairs that stand still": {"rope_scaling": {"rope_type": "longrope", "factor": 2.0, **dict.fromkeys(LISTS, STILL)}},
}


@pytest.mark.parametrize("values", HOSTILE.values(), ids=HOSTILE.keys())
def test_strange_geometries_give_numbers(values, theory, ropecli, folder):
    checkpoint = folder(**{"head_dim": 32, "max_position_embeddings": 256, **values})
    for method in ([], ["--methods", "linear,rerope", "--factor", 8]):
        report = theory(checkpoint, *method)
        assert report["ropes"][0]["name"] == "pretrained"
        shown = text(ropecli("theory", checkpoint, *method)).replace(str(checkpoint), "")
        assert not re.search(r"\b(nan|inf|None)\b", shown)
