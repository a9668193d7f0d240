"""Distance methods are evaluated alike when written and in memory, at once and in chunks, alone and compared.

tests/attention checks their attention against a brute force.
"""

import itertools

import pytest


@pytest.fixture
def losses(ropecli, corpus):
    """losses(command, folder, ...) -> Σ nll by length, of each report's method."""

    def call(command, folder, *options):
        fixed = ["--data", corpus, "--lengths", "24,64,130", "--max-documents", 4, "--json"]
        outcome = ropecli(command, folder, *fixed, *options)
        assert outcome.code == 0, outcome.err
        assert "instead of chunks" not in outcome.err
        return {
            report["method"]: [row["nll"] * row["tokens"] for row in report["rows"]] for report in outcome.reports()
        }

    return call


@pytest.mark.parametrize("method", ["rerope", "self-extend"])
def test_written_in_memory_and_in_chunks_the_losses_are_the_same(method, llama, ropecli, losses, tmp_path):
    in_memory = ["--method", method, "--factor", 4]
    assert ropecli("patch", llama, *in_memory, "-o", tmp_path / "written").code == 0
    expected = losses("eval-ppl", tmp_path / "written")
    for options in ([], ["--chunk", 17, "--batch-size", 4]):
        assert losses("eval-ppl", llama, *in_memory, *options)[method] == pytest.approx(expected[method], rel=1e-5)
    assert losses("eval-ppl", llama)["none"][-1] != pytest.approx(expected[method][-1], rel=2e-3), "the method shows"


def test_compared_methods_do_not_affect_each_other(llama, losses):
    methods = ["none", "rerope", "dynamic", "streaming"]
    forward, backward = (losses("compare", llama, "--methods", ",".join(order)) for order in (methods, methods[::-1]))
    assert forward == backward
    assert forward["rerope"] == losses("eval-ppl", llama, "--method", "rerope", "--factor", 4)["rerope"]
    assert all(first[-1] != second[-1] for first, second in itertools.combinations(forward.values(), 2))
