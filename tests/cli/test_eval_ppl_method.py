"""`ropecli eval-ppl --method`: the model patched in memory gives what the patched checkpoint gives."""

import pytest

METHODS = {
    "yarn": ["--set", "beta_fast=8"],
    "dynamic": [],
}


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


def test_the_result_says_what_was_measured(evaluate, measured, ropecli, llama, tmp_path):
    report = measured("--method", "linear", "--factor", 4, "--original-length", 32)
    assert (report["in_memory"], report["original_max_position_embeddings"]) == (True, 32)
    plain = measured()
    assert (plain["in_memory"], plain["original_max_position_embeddings"]) == (False, 64)
    assert "linear ×4 in memory: perplexity" in " ".join(evaluate("--method", "linear", "--factor", 4).out.split())
    assert ropecli("patch", llama, "--method", "yarn", "--factor", 4, "--no-verify", "-o", tmp_path / "out").code == 0
    assert "none in memory" in " ".join(evaluate("--method", "none", checkpoint=tmp_path / "out").out.split())
    assert "in memory" not in evaluate().out
