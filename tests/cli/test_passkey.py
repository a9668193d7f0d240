"""ropecli passkey: one JSON document or one message, whatever is asked."""

import json

import pytest

from ropecli.demo import FOLDER

LENGTHS = "280,330"


@pytest.fixture
def ask(ropecli, llama):
    def call(*options, checkpoint=llama, lengths=LENGTHS):
        return ropecli("passkey", checkpoint, "--lengths", lengths, "--trials", 2, "--depths", "0,1", *options)

    return call


def test_json_is_all_that_is_on_standard_output(ask, llama):
    outcome = ask("--json")
    report = json.loads(outcome.out)
    assert outcome.code == 0
    assert (report["kind"], report["task"], report["settings"]["mode"]) == ("scores", "passkey", "rank")
    assert (report["checkpoint"], report["method"], report["in_memory"]) == (str(llama), "none", False)
    assert report["original_max_position_embeddings"] == 64
    assert [(cell["length"], cell["depth"], cell["chance"], len(cell["sums"])) for cell in report["cells"]] == [
        (280, 0.0, 0.1, 2),
        (280, 1.0, 0.1, 2),
        (330, 0.0, 0.1, 2),
        (330, 1.0, 0.1, 2),
    ]
    assert report["settings"]["prompts_read_once"]
    assert len(report["fingerprint"]) == 64
    assert report["command"][:3] == ["ropecli", "passkey", str(llama)]


@pytest.mark.skipif(not (FOLDER / "model.safetensors").is_file(), reason="no demo checkpoint here")
def test_the_advice_on_a_length_is_true(ask):
    """The demo's tokenizer gives keys different numbers of tokens."""
    options = {"checkpoint": "demo", "lengths": "64,300"}
    least = ask("--trials", 5, **options).err.split("at least ")[1].strip().rstrip(".")
    outcome = ask("--trials", 5, **{**options, "lengths": least})
    assert (outcome.code, outcome.err.count("error")) == (0, 0)


def test_generated_answers(ask):
    report = json.loads(ask("--json", "--mode", "generate").out)
    assert report["settings"]["mode"] == "generate"
    assert {(cell["chance"], cell.get("margin")) for cell in report["cells"]} == {(1 / 90_000, None)}
    assert ask("--mode", "generate").code == 0


def test_what_does_not_fit_is_known_before_the_weights_are_loaded(ask, monkeypatch, tmp_path):
    from ropecli import attention

    def load(*arguments, **options):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(attention, "load_model", load)
    assert ask(lengths="20,300").code == 2
    (tmp_path / "file").write_text("")
    assert ask("--output", tmp_path / "file" / "report.json").code == 2
    assert ask("--plot", tmp_path / "file" / "map.png").code == 2
