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


def test_the_table_shows_the_same_numbers(ask):
    report = json.loads(ask("--json", "--candidates", 2).out)
    table = ask("--candidates", 2, "--verbose").out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines()]
    at = [[cell for cell in report["cells"] if cell["length"] == length] for length in (280, 330)]
    assert ["mean", *(f"{100 * sum(sum(cell['sums']) for cell in cells) / 4:.1f}" for cells in at)] in rows
    assert ["margin (nats)", *(f"{sum(cell['margin'] for cell in cells) / 2:+.2f}" for cells in at)] in rows


def test_a_method_in_memory_measures_what_a_patched_folder_does(ropecli, ask, llama, tmp_path):
    for method in ("yarn", "dynamic"):
        ropecli("patch", llama, "--method", method, "--factor", 8, "--output", tmp_path / method)
        folder = json.loads(ask("--json", checkpoint=tmp_path / method).out)
        memory = json.loads(ask("--json", "--method", method, "--factor", 8).out)
        assert folder["settings"]["prompts_read_once"] == memory["settings"]["prompts_read_once"] == (method == "yarn")
        for mine, other in zip(folder["cells"], memory["cells"], strict=True):
            assert mine["margin"] == pytest.approx(other["margin"], abs=1e-3)


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


WRONG = {
    "a mode that is not known": (["--mode", "ranks"], "Did you mean 'rank'"),
    "a depth beyond the text": (["--depths", "0,1.5"], "--depths"),
    "a length without room": (["--lengths", "20"], "at least"),
    "a length beyond all memory": (["--lengths", "999999999999"], "999999999999"),
}


@pytest.mark.parametrize(("options", "expected"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_option_is_one_message(ask, options, expected):
    outcome = ask(*options)
    assert (outcome.code, outcome.out) == (2, "")
    assert expected in " ".join(outcome.err.split())
    assert "Traceback" not in outcome.err


def test_what_does_not_fit_is_known_before_the_weights_are_loaded(ask, monkeypatch, tmp_path):
    from ropecli import attention

    def load(*arguments, **options):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(attention, "load_model", load)
    assert ask(lengths="20,300").code == 2
    (tmp_path / "file").write_text("")
    assert ask("--output", tmp_path / "file" / "report.json").code == 2
    assert ask("--plot", tmp_path / "file" / "map.png").code == 2
