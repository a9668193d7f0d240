"""`ropecli inspect A B`, side by side; and the table in a terminal of 80 columns."""

import json

import pytest

from ropecli.cli import terminal

LAYERS = ["sliding_attention", "full_attention"]
ASIDE = {"checkpoint", "inv_freq", "ropes", "warnings", "findings"}


@pytest.fixture
def yarn(llama, ropecli, tmp_path):
    arguments = ["--method", "yarn", "--factor", 4, "--no-verify", "-o", tmp_path / "yarn"]
    assert ropecli("patch", llama, *arguments).code == 0
    return tmp_path / "yarn"


@pytest.fixture(scope="module")
def gemma(build):
    return build("gemma3_text", head_dim=32, layer_types=LAYERS, sliding_window=32)


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """Folders of tests have long names."""
    monkeypatch.setattr(terminal.out, "width", 400)


@pytest.fixture
def narrow(wide, monkeypatch):
    monkeypatch.setattr(terminal.out, "width", 80)


def rows(text: str) -> dict[str, list[str]]:
    lines = [[part.strip() for part in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    return {name: cells for name, *cells in lines}


def test_each_has_its_column_and_differing_rows_are_marked(llama, yarn, ropecli):
    outcome = ropecli("inspect", llama, yarn)
    assert (outcome.code, outcome.err) == (0, "")
    table = rows(outcome.out)
    assert table["≠ method"] == ["none", "yarn"]
    assert table["≠ factor"] == ["1", "4"]
    assert table["≠ max_position_embeddings"] == ["64 tokens", "256 tokens"]
    assert table["≠ tokenizer model_max_length"] == ["64 tokens", "256 tokens"]
    assert table["head_dim"] == ["32", "32"]
    assert table["rope_theta"] == ["10,000", "10,000"]
    assert f"{llama} (llama)" in outcome.out
    assert f"{yarn} (llama)" in outcome.out


def test_json_holds_both_reports_and_where_they_differ(llama, yarn, ropecli):
    result = json.loads(ropecli("inspect", llama, yarn, "--json").out)
    assert result.keys() == {"checkpoints", "differences"}
    alone = [json.loads(ropecli("inspect", folder, "--json").out) for folder in (llama, yarn)]
    assert result["checkpoints"] == alone
    differing = {key for key in alone[0].keys() - ASIDE if alone[0][key] != alone[1][key]}
    assert set(result["differences"]) == differing
    assert {"method", "factor", "params", "attention_factor", "max_position_embeddings"} <= differing
    assert not {"head_dim", "rope_theta", "original_max_position_embeddings", "model_type"} & differing


def test_findings_are_told_apart(llama, edited, ropecli):
    folder = edited(llama, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
    out = ropecli("inspect", llama, folder).out
    assert f"No problems found in {llama}." in out
    assert f"found in {folder}:" in out
    assert f"ropecli patch {folder} --method linear" in out


# In a terminal of 80 columns.


def test_nothing_is_cut_off(llama, yarn, gemma, narrow, ropecli):
    for names in ((yarn,), (gemma, yarn)):
        outcome = ropecli("inspect", *names)
        assert outcome.code == 0
        assert "…" not in outcome.out
        drawn = [line for line in outcome.out.splitlines() if set(line) & set("│┃┏└")]
        assert drawn
        assert max(map(len, drawn)) <= 80
        for part in ("max_position_embeddings", "float32 angle error at the end", "256 tokens"):
            assert part in outcome.out


def test_a_command_to_paste_is_on_one_line(llama, narrow, edited, ropecli):
    folder = edited(llama, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
    (line,) = [line for line in ropecli("inspect", folder).out.splitlines() if "fix:" in line]
    assert line.strip().startswith("fix: ropecli patch ")
    assert line.endswith("--output DIR")
