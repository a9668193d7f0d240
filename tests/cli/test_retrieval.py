"""ropecli needle: what its reports say."""

import pytest


@pytest.fixture
def passkey(ropecli, llama):
    def call(*options, checkpoint=llama, lengths="280,330"):
        searched = ["--samples", 2, "--depths", "0,1", *options]
        return ropecli("needle", checkpoint, "--style", "passkey", "--lengths", lengths, *searched)

    return call


@pytest.fixture
def needle(ropecli, llama, corpus):
    def call(*options, lengths="80,150"):
        return ropecli("needle", llama, "--data", corpus, "--lengths", lengths, "--samples", 2, *options)

    return call


def test_generated_answers(passkey):
    report = passkey("--json", "--mode", "generate").report()
    assert report["settings"]["mode"] == "generate"
    assert {cell["chance"] for cell in report["cells"]} == {1 / 90_000}


def test_a_length_or_output_that_cannot_be_is_refused_before_the_weights_are_loaded(passkey, monkeypatch, tmp_path):
    from ropecli.evaluation import subject

    monkeypatch.setattr(subject, "load_model", lambda *arguments, **options: pytest.fail("the model was loaded"))
    passkey(lengths="20,300").is_refused()
    (tmp_path / "file").write_text("")
    passkey("--output", tmp_path / "file" / "report.json").is_refused()
    passkey("--plot", tmp_path / "file" / "map.png").is_refused()


def test_a_report_of_needle(needle, corpus):
    report = needle("--json", "--style", "code", "--depths", "1,0,0.5").report()
    assert (report["kind"], report["task"], report["source"]) == ("scores", "needle", str(corpus))
    assert [(cell["length"], cell["depth"], cell["chance"]) for cell in report["cells"]] == [
        (length, depth, 0.1) for length in (80, 150) for depth in (0, 0.5, 1)
    ]
    assert report["settings"]["style"] == "code"
