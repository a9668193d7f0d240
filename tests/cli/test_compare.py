"""ropecli compare: methods, factors and checkpoints in one table, each checkpoint loaded once; stopped and resumed."""

import gc
import json
import weakref

import pytest


@pytest.fixture(scope="module")
def other(build):
    return build("qwen2", num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture
def compare(ropecli, llama, other, corpus):
    def call(*options, checkpoints=(llama, other), methods="none,linear,dynamic"):
        fixed = ["--data", corpus, "--lengths", "24,64,128", "--max-documents", 4, "--methods", methods]
        return ropecli("compare", *checkpoints, *fixed, *options)

    return call


@pytest.fixture
def measured(compare):
    return lambda *options, **where: compare("--json", *options, **where).reports()


def numbers(reports):
    return [(one["checkpoint"], one["method"], [cell["sums"] for cell in one["cells"]]) for one in reports]


def test_every_method_has_a_report_with_each_factor_and_its_parameters(measured, llama):
    settings = ["--factors", "2,4", "--set", "abf+cope.beta=5", "--set", "yarn+rerope.frequency_factor=2"]
    reports = measured(*settings, checkpoints=[llama], methods="none,linear,abf+cope,yarn+rerope")
    labels = [(report["method"], report["factor"]) for report in reports]
    # with its own base, abf+cope computes the same at every factor, and is measured once
    assert labels == [
        ("none", 1),
        ("linear", 2),
        ("linear", 4),
        ("abf+cope", 2),
        ("yarn+rerope", 2),
        ("yarn+rerope", 4),
    ]
    assert all([row["length"] for row in report["rows"]] == [24, 64, 128] for report in reports)
    assert len({report["fingerprint"] for report in reports}) == 1
    assert len({report["rows"][2]["ppl"] for report in reports if report["factor"] != 2}) == 3
    assert reports[-1]["params"]["frequency_factor"] == 2


def test_plot_and_report_are_written_beside_the_table(compare, llama, tmp_path):
    outcome = compare("--plot", tmp_path / "plot.png", "--output", tmp_path / "reports.json", checkpoints=[llama])
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    for report in json.loads((tmp_path / "reports.json").read_text())["reports"]:
        name = "base" if report["method"] == "none" else report["method"]
        line = next(line for line in outcome.out.splitlines() if line.strip("| *").startswith(name))
        assert [cell.strip(" *") for cell in line.split("|")[2:-1]] == [f"{row['ppl']:.2f}" for row in report["rows"]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plot.png", "reports.json"]


def test_several_checkpoints_give_what_each_gives_alone_and_are_loaded_once(measured, llama, other, monkeypatch):
    from ropecli.evaluation import subject

    load, loads, models = subject.load_model, [], []

    def watched(checkpoint, **options):
        gc.collect()
        assert not any(model() is not None for model in models), "one in memory at a time"
        loads.append(checkpoint.folder)
        models.append(weakref.ref(model := load(checkpoint, **options)))
        return model

    monkeypatch.setattr(subject, "load_model", watched)
    options = ["--chunk", 30, "--batch-size", 3]
    together = measured(*options, checkpoints=[llama, other, llama])
    assert loads == [llama, other]
    assert {"chunk": 30, "batch_size": 3}.items() <= together[0]["settings"].items()
    alone = [report for folder in (llama, other) for report in measured(*options, checkpoints=[folder])]
    assert numbers(together) == numbers(alone)
    assert [report["weights"] for report in together] == [report["weights"] for report in alone]
    assert alone[1]["rows"][2]["ppl"] != alone[4]["rows"][2]["ppl"]


def test_a_stopped_comparison_resumes(compare, measured, stopping, tmp_path):
    """Within the second checkpoint: 4 documents, 3 methods, 2 checkpoints; dynamic is read at each of 3 lengths."""
    after, output = 22, tmp_path / "reports.json"
    with stopping(after):
        outcome = compare("--output", output)
    assert outcome.code == 130
    assert "--resume" in outcome.err
    compare("--output", output).is_refused("a run that was interrupted")
    compare("--output", output, "--resume", "--factors", 2).is_refused("jobs.1.scaling: ")
    with stopping(0) as samples:
        compare("--output", output, "--resume").succeeds()
    assert len(samples) == 2 * 20 - after
    assert numbers(json.loads(output.read_text())["reports"]) == numbers(measured())
    assert [path.name for path in tmp_path.iterdir()] == ["reports.json"]


def test_as_is_measures_the_shipped_scaling(measured, compare, patched, ropecli, llama, corpus):
    folder = patched(llama, "dynamic")
    reports = measured(checkpoints=[folder], methods="linear,as-is,none")
    labels = [(report["method"], report["in_memory"]) for report in reports]
    assert labels == [("none", True), ("dynamic", False), ("linear", True)]  # the unscaled one is compared with
    fixed = ["--data", corpus, "--lengths", "24,64,128", "--max-documents", 4, "--json"]
    alone = ropecli("eval-ppl", folder, *fixed).report()
    assert numbers(reports[1:2]) == numbers([alone])
    assert numbers(reports[:1])[0][2] != numbers([alone])[0][2]
    out = compare(checkpoints=[folder], methods="as-is,dynamic").out  # equal numbers, so one model
    assert [line.split(" | ")[0] for line in out.splitlines() if line[:1] == "|"][2:] == ["| 24", "| 64", "| 128"]


def test_replacing_a_shipped_scaling_warns(compare, patched, llama):
    folder = patched(llama, "yarn")
    said = f"{folder.name} ships with yarn ×4, which every method here replaces"
    assert said in compare(checkpoints=[folder], methods="none").said
    assert "ships with" not in compare(checkpoints=[folder], methods="as-is,none").err
    assert "ships with" not in compare(checkpoints=[llama], methods="none").err
