"""`ropecli eval-ppl --method`: the model patched in memory gives what the patched checkpoint gives."""

import json

import pytest

METHODS = {
    "yarn": ["--set", "beta_fast=8"],
    "dynamic": [],
}


@pytest.fixture
def evaluate(ropecli, llama, corpus):
    def call(*options, checkpoint=llama, lengths="24,64,128"):
        arguments = ["--data", corpus, "--lengths", lengths, "--max-documents", 4]
        return ropecli("eval-ppl", checkpoint, *arguments, *options)

    return call


@pytest.fixture
def measured(evaluate):
    def call(*options, **where) -> dict:
        outcome = evaluate("--json", *options, **where)
        assert outcome.code == 0, outcome.err
        return json.loads(outcome.out)

    return call


def ppls(report: dict) -> list[float]:
    return [row["ppl"] for row in report["rows"]]


@pytest.mark.parametrize("method", METHODS)
def test_it_equals_the_patched_checkpoint(method, measured, ropecli, llama, tmp_path):
    arguments = ["--method", method, "--factor", 4, *METHODS[method]]
    assert ropecli("patch", llama, *arguments, "--output", tmp_path / "out").code == 0
    written, live = measured(checkpoint=tmp_path / "out"), measured(*arguments)
    assert ppls(live) == pytest.approx(ppls(written), rel=1e-4)
    if method == "yarn":
        assert live["params"]["beta_fast"] == written["params"]["beta_fast"] == 8
    for key in ("method", "factor", "task", "fingerprint"):
        assert live[key] == written[key], key
    assert ppls(live) != pytest.approx(ppls(measured()), rel=1e-4)


def test_a_corrected_window_counts(measured, ropecli, llama, tmp_path):
    arguments = ["--method", "yarn", "--factor", 4, "--original-length", 32]
    assert ropecli("patch", llama, *arguments, "--output", tmp_path / "out").code == 0
    live = measured(*arguments)
    assert ppls(live) == pytest.approx(ppls(measured(checkpoint=tmp_path / "out")), rel=1e-4)
    assert ppls(live) != pytest.approx(ppls(measured(*arguments[:-2])), rel=1e-4)


def test_dynamic_yarn_follows_the_length(measured):
    """No stock reader can express it: at each length it is yarn by as much as that length needs."""
    rows = measured("--method", "dynamic-yarn", "--factor", 4)["rows"]
    assert [row["length"] for row in rows] == [24, 64, 128]
    plain, twice = measured(), measured("--method", "yarn", "--factor", 2)
    for row, expected in zip(rows, [*plain["rows"][:2], twice["rows"][2]], strict=True):
        assert row["ppl"] == pytest.approx(expected["ppl"], rel=1e-5)
    assert rows[2]["ppl"] != pytest.approx(plain["rows"][2]["ppl"], rel=1e-5)


WRONG = {
    "a factor without a method": (["--factor", 4], "need a method"),
    "a method without a factor": (["--method", "yarn"], "yarn needs --factor, such as --factor 4"),
    "an unknown method": (["--method", "yran", "--factor", 4], "Did you mean 'yarn'?"),
    "numbers that are missing": (["--method", "longrope", "--factor", 4], "requires long_factor"),
}


@pytest.mark.parametrize(("options", "named"), WRONG.values(), ids=WRONG)
def test_a_wrong_option_is_one_message_before_the_model_is_loaded(options, named, evaluate, monkeypatch):
    from ropecli.evaluation import subject

    def load(*arguments):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(subject, "load", load)
    outcome = evaluate(*options)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.count("error:") == 1
    assert named in " ".join(outcome.err.split())


def test_the_result_says_what_was_measured(evaluate, measured, ropecli, llama, tmp_path):
    report = measured("--method", "linear", "--factor", 4, "--original-length", 32)
    assert (report["in_memory"], report["original_max_position_embeddings"]) == (True, 32)
    plain = measured()
    assert (plain["in_memory"], plain["original_max_position_embeddings"]) == (False, 64)
    assert "linear ×4 in memory: perplexity" in " ".join(evaluate("--method", "linear", "--factor", 4).out.split())
    assert ropecli("patch", llama, "--method", "yarn", "--factor", 4, "--no-verify", "-o", tmp_path / "out").code == 0
    assert "none in memory" in " ".join(evaluate("--method", "none", checkpoint=tmp_path / "out").out.split())
    assert "in memory" not in evaluate().out


def test_what_the_scaling_gives_rise_to_is_said(evaluate):
    outcome = evaluate("--method", "abf", "--factor", 4, "--set", "beta=0.1")
    assert "does not extend" in " ".join(outcome.err.split())
    assert "ropecli.yaml" not in outcome.err
