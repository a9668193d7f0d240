"""`ropecli inspect`: what it reports is what stock transformers would do; and two checkpoints."""

import numpy as np
import pytest

FACTORS = np.linspace(1, 6, 16).tolist()
PATCHES = {"yarn": {"beta_fast": 16.0, "truncate": False}, "longrope": {"long_factor": FACTORS}, "dynamic": {}}
UNCLEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}


@pytest.fixture
def inspected(ropecli):
    return lambda *folders: ropecli("inspect", *folders, "--json").json()


@pytest.fixture
def assert_live(live):
    """The report has the numbers of stock transformers' module at that length."""

    def check(report, folder, length, layer_type=None) -> None:
        inv_freq, attention_factor = live(folder)[layer_type].at_length(length)
        np.testing.assert_allclose(report["inv_freq"], inv_freq, rtol=2e-6)
        assert report["attention_factor"] == pytest.approx(attention_factor, rel=1e-6)

    return check


def rows(text: str) -> dict[str, list[str]]:
    lines = [[part.strip() for part in line.split("|")[1:-1]] for line in text.splitlines() if line[:1] == "|"]
    return {name.removesuffix("*"): cells for name, *cells in lines}


def test_an_unpatched_checkpoint(llama, inspected, assert_live):
    report = inspected(llama)
    assert (report["checkpoint"], report["model_type"]) == (str(llama), "llama")
    assert report["head_dim"] == report["rotary_dim"] == 32
    assert report["rope_theta"] == 10000.0
    assert report["original_max_position_embeddings"] == report["max_position_embeddings"] == 64
    assert report["tokenizer_model_max_length"] == 64
    assert (report["method"], report["factor"], report["params"]) == ("none", 1.0, {})
    assert (report["pairs"], report["findings"]) == (16, [])
    assert_live(report, llama, 64)


@pytest.mark.parametrize("method", PATCHES)
def test_a_patched_checkpoint_with_and_without_its_record(method, llama, patched, inspected, assert_live):
    folder = patched(llama, method, 4.0, **PATCHES[method])
    report = inspected(folder)
    assert (report["method"], report["factor"]) == (method, 4.0)
    switches = ["switches-with-length"] if method == "dynamic" else []
    assert [finding["rule"] for finding in report["findings"]] == switches
    assert report["original_max_position_embeddings"] == 64
    # stock readers take max_position_embeddings for dynamic's pretraining length
    assert report["max_position_embeddings"] == (64 if method == "dynamic" else 256)
    assert report["tokenizer_model_max_length"] == 256
    if method == "yarn":
        assert report["params"] == {"beta_fast": 16, "beta_slow": 1.0, "truncate": False}
    # what the numbers of a method that depends on the length are for: the target length
    assert_live(report, folder, 256)
    (folder / "ropecli.yaml").unlink()
    if method != "dynamic":  # whose target length is in the record alone
        report = inspected(folder)
        assert (report["method"], report["factor"]) == (method, 4.0)
        assert_live(report, folder, 256)


# Two checkpoints.


def test_two_checkpoints_have_a_column_each_and_differing_rows_are_marked(llama, yarn, ropecli, inspected):
    table = rows(ropecli("inspect", llama, yarn).succeeds().out)
    assert table["≠ method"] == ["none", "yarn"]
    assert table["≠ factor"] == ["1", "4"]
    assert table["≠ max_position_embeddings"] == table["≠ tokenizer model_max_length"] == ["64 tokens", "256 tokens"]
    assert table["head_dim"] == ["32", "32"]
    both, alone = inspected(llama, yarn), [inspected(folder) for folder in (llama, yarn)]
    assert both.keys() == {"checkpoints", "differences"}
    assert both["checkpoints"] == alone
    aside = {"checkpoint", "inv_freq", "ropes", "layers", "limits", "findings"}
    assert set(both["differences"]) == {key for key in alone[0].keys() - aside if alone[0][key] != alone[1][key]}


def test_layers_and_what_limits_the_length(llama, edited, ropecli, inspected):
    folder = edited(llama, model_type="cohere2", sliding_window=16)
    out = " ".join(ropecli("inspect", folder, "-v").succeeds().out.split())
    assert "2 sliding, 16 tokens; rotary, base 10,000" in out
    assert "No layer sees further than 16 tokens" in out
    assert "(none beyond the windows)" in out
    folder = edited(llama, "other", model_type="smollm3", no_rope_layers=[1, 0])
    report = inspected(folder)
    assert [(kind["count"], kind["attention"], kind["rotates"]) for kind in report["layers"]] == [
        (1, "full", True),
        (1, "full", False),
    ]
    assert report["limits"][0].startswith("Only 1 of the 2 layers that see the whole context have rotary positions")
    keys_and_values = 2 * report["head_dim"] * 2 * 2  # of two layers, in two bytes
    assert report["kv_cache_bytes_per_token"] == keys_and_values
    assert report["kv_cache_bytes"] == keys_and_values * report["context_length"]
    assert inspected(folder, "--probe")["layers"] == report["layers"]


def test_the_advice_of_inspect_can_be_followed(llama, yarn, edited, ropecli, inspected):
    (advice,) = inspected(llama)["limits"]
    assert (
        "rotary positions of 2 layers limit the length: pretrained on 64 tokens. To read 128 tokens, measured" in advice
    )
    _, search, _, command, _ = advice.split("`")
    assert search == f"ropecli extend {llama} --length 128 --data YOUR_TEXTS --output DIR"
    assert command == f"ropecli patch {llama} --method yarn --factor 4 --target-length 128 --output DIR"
    words = [str(llama.parent / "followed") if word == "DIR" else word for word in command.split()[1:]]
    ropecli(*words).succeeds()
    (scaled,) = inspected(yarn)["limits"]
    assert "pretrained on 64 tokens and scaled to 256 by yarn ×4. A patch replaces this scaling." in scaled
    (still,) = inspected(edited(llama, model_type="smollm3", no_rope_layers=[0, 0]))["limits"]
    assert still.startswith("No layer that sees the whole context has rotary positions, so a scaling has no effect")
    assert "--method none --target-length N to only raise the context length" in still
    encoder = inspected(edited(llama, "encoder", architectures=["EuroBertForMaskedLM"]))
    assert (encoder["kv_cache_bytes"], encoder["kv_cache_bytes_per_token"]) == (None, None)


def test_a_model_without_rotary_embeddings_is_refused(llama, edited, ropecli):
    bloom = edited(llama, "bloom", model_type="bloom")
    ropecli("inspect", llama, bloom).is_refused("model_type 'bloom' has no rotary position embedding")


def test_findings_name_their_checkpoint(llama, edited, ropecli):
    folder = edited(llama, rope_parameters=UNCLEAR)
    out = ropecli("inspect", llama, folder).out
    assert f"No problems found in {llama}." in out
    assert f"found in {folder}:" in out
    assert "no-pretraining-length: " in out
    assert f"ropecli patch {folder} --method linear" in out


def test_lengths_come_first_and_geometry_on_request(yarn, ropecli):
    lines = ropecli("inspect", yarn).succeeds().out.splitlines()
    assert lines[0].endswith("(llama) reads 256 tokens; pretrained on 64 (source: ropecli.yaml), scaled by yarn ×4.")
    assert lines[1] == "No problems found."
    assert not any("head_dim" in line or "KV cache in" in line for line in lines)


def test_a_fix_is_one_line_to_paste(llama, edited, ropecli):
    folder = edited(llama, rope_parameters=UNCLEAR)
    (line,) = [line for line in ropecli("inspect", folder).out.splitlines() if "fix:" in line]
    assert line.strip().startswith("fix: ropecli patch ")
    assert line.endswith("--output DIR")
