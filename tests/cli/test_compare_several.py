"""ropecli compare on several checkpoints: every method on each, each loaded once; stopped and resumed."""

import json

import pytest


@pytest.fixture(scope="module")
def other(build):
    return build("qwen2", num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture
def compare(ropecli, llama, other, corpus):
    def call(*options, checkpoints=(llama, other), methods="none,linear,dynamic", lengths="24,64,128"):
        fixed = ["--lengths", lengths, "--max-documents", 4, "--methods", methods]
        return ropecli("compare", *checkpoints, "--data", corpus, *fixed, *options)

    return call


@pytest.fixture
def measured(compare):
    def call(*options, **where):
        outcome = compare("--json", *options, **where)
        assert outcome.code == 0, outcome.err
        return json.loads(outcome.out)

    return call


def numbers(reports):
    return [(one["checkpoint"], one["method"], [cell["sums"] for cell in one["cells"]]) for one in reports]


def test_several_checkpoints_are_what_each_is_alone(measured, llama, other):
    together = measured("--chunk", 30, "--batch-size", 3)
    assert {"chunk": 30, "batch_size": 3}.items() <= together[0]["settings"].items()
    alone = [measured("--chunk", 30, "--batch-size", 3, checkpoints=[one]) for one in (llama, other)]
    assert numbers(together) == numbers(alone[0] + alone[1])
    assert [(one["checkpoint"], one["method"]) for one in together] == [
        (str(folder), method) for folder in (llama, other) for method in ("none", "linear", "dynamic")
    ]
    assert [one["digest"] for one in together] == [one["digest"] for one in alone[0] + alone[1]]
    assert alone[0][1]["rows"][2]["ppl"] != alone[1][1]["rows"][2]["ppl"]


def test_each_checkpoint_is_loaded_once(measured, llama, other, monkeypatch):
    from ropecli.evaluation import subject

    load, loads = subject.load_model, []

    def watched(checkpoint, **options):
        loads.append(checkpoint.folder)
        return load(checkpoint, **options)

    monkeypatch.setattr(subject, "load_model", watched)
    measured(checkpoints=[llama, other, llama])
    assert loads == [llama, other]


def test_a_stopped_comparison_is_resumed(compare, measured, stopping, other, tmp_path):
    """Within the second checkpoint: 4 documents, 3 methods, 2 checkpoints; dynamic is read at each of 3 lengths."""
    after, output = 22, tmp_path / "reports.json"
    with stopping(after):
        outcome = compare("--output", output)
    assert outcome.code == 130
    assert "--resume" in outcome.err
    again = compare("--output", output)
    assert (again.code, again.out) == (2, "")
    assert "a run that was interrupted" in " ".join(again.err.split())
    refused = compare("--output", output, "--resume", "--factors", 2)
    assert refused.code == 2
    assert "jobs.1.scaling: " in refused.err
    with stopping(0) as samples:
        resumed = compare("--output", output, "--resume")
    assert resumed.code == 0, resumed.err
    assert len(samples) == 2 * 20 - after
    assert numbers(json.loads(output.read_text())) == numbers(measured())
    assert [path.name for path in tmp_path.iterdir()] == ["reports.json"]


def test_as_is_leaves_a_checkpoint_its_own_scaling(measured, compare, ropecli, llama, corpus, tmp_path):
    folder = tmp_path / "dynamic"
    assert ropecli("patch", llama, "--method", "dynamic", "--factor", 4, "--output", folder).code == 0
    reports = measured(checkpoints=[folder], methods="linear,as-is,none")
    assert [(one["method"], one["in_memory"]) for one in reports] == [
        ("dynamic", False),
        ("linear", True),
        ("none", True),
    ]
    fixed = ["--data", corpus, "--lengths", "24,64,128", "--max-documents", 4, "--json"]
    alone = json.loads(ropecli("eval-ppl", folder, *fixed).out)
    assert numbers(reports[:1]) == numbers([alone])
    assert numbers(reports[2:])[0][2] != numbers([alone])[0][2]
    table = compare(checkpoints=[folder], methods="as-is,dynamic").out
    assert "dynamic ×4, as shipped" in table


def test_that_methods_take_the_place_of_a_shipped_scaling_is_said(compare, ropecli, llama, tmp_path):
    folder = tmp_path / "yarn"
    assert ropecli("patch", llama, "--method", "yarn", "--factor", 4, "--output", folder).code == 0
    assert "yarn ships with yarn ×4, which every method here replaces" in " ".join(
        compare(checkpoints=[folder], methods="none").err.split()
    )
    assert "ships with" not in compare(checkpoints=[folder], methods="as-is,none").err
    assert "ships with" not in compare(checkpoints=[llama], methods="none").err
