"""`ropecli inspect`: what it reports is what stock transformers would do."""

import json
import shutil

import numpy as np
import pytest

KEYS = {
    "checkpoint",
    "model_type",
    "head_dim",
    "rotary_dim",
    "rope_theta",
    "original_max_position_embeddings",
    "max_position_embeddings",
    "tokenizer_model_max_length",
    "method",
    "factor",
    "params",
    "attention_factor",
    "inv_freq",
    "target_length",
    "remaps",
    "largest_distance",
    "supported_length",
    "smallest_base",
    "ropes",
    "warnings",
}
LAYERS = ["sliding_attention", "full_attention"]
FACTORS = np.linspace(1, 6, 16).tolist()
PATCHES = {
    "yarn": ["--set", "beta_fast=16", "--set", "truncate=false"],
    "longrope": ["--set", f"long_factor={FACTORS}"],
    "dynamic": [],
}


@pytest.fixture
def inspected(ropecli):
    """inspected(folder) -> the report of --json, which is all that is on standard output."""

    def call(folder) -> dict:
        outcome = ropecli("inspect", folder, "--json")
        assert outcome.code == 0, outcome.err
        return json.loads(outcome.out)

    return call


@pytest.fixture
def live(tmp_path):
    """live(folder, length) -> (inv_freq, attention factor) of stock transformers' module at that length."""
    from ropecli.live.rotary import rotary_tables
    from ropecli.live.stock_transformers import build_without_weights

    def tables(folder, length: int, layer_type: str | None = None):
        found = {table.layer_type: table for table in rotary_tables(build_without_weights(folder))}
        return found[layer_type].at_length(length)

    return tables


def assert_live(report: dict, live: tuple[np.ndarray, float]) -> None:
    inv_freq, attention_factor = live
    np.testing.assert_allclose(report["inv_freq"], inv_freq, rtol=2e-6)
    assert report["attention_factor"] == pytest.approx(attention_factor, rel=1e-6)


def test_an_unpatched_checkpoint(llama, inspected, live):
    report = inspected(llama)
    assert set(report) >= KEYS
    assert report["checkpoint"] == str(llama)
    assert report["model_type"] == "llama"
    assert report["head_dim"] == report["rotary_dim"] == 32
    assert report["rope_theta"] == 10000.0
    assert report["original_max_position_embeddings"] == report["max_position_embeddings"] == 64
    assert report["tokenizer_model_max_length"] == 64
    assert (report["method"], report["factor"], report["params"]) == ("none", 1.0, {})
    assert (report["pairs"], report["warnings"]) == (16, [])
    assert_live(report, live(llama, 64))


@pytest.mark.parametrize("method", PATCHES)
def test_a_patched_checkpoint(method, llama, ropecli, inspected, live, tmp_path):
    folder = tmp_path / "out"
    assert ropecli("patch", llama, "--method", method, "--factor", 4, *PATCHES[method], "-o", folder).code == 0
    report = inspected(folder)
    assert set(report) >= KEYS
    assert (report["method"], report["factor"]) == (method, 4.0)
    assert report["original_max_position_embeddings"] == 64
    # stock readers take max_position_embeddings for dynamic's pretraining length
    assert report["max_position_embeddings"] == (64 if method == "dynamic" else 256)
    assert report["tokenizer_model_max_length"] == 256
    if method == "yarn":
        assert report["params"] == {"beta_fast": 16, "beta_slow": 1.0, "truncate": False}
    # what the numbers of a method that depends on the length are for: the target length
    assert_live(report, live(folder, 256))
    assert report["warnings"] == []  # the config alone leaves the window open; the note does not


@pytest.mark.parametrize("method", ["yarn", "longrope"])
def test_a_patched_checkpoint_whose_note_is_lost(method, llama, ropecli, inspected, live, tmp_path):
    folder = tmp_path / "out"
    assert ropecli("patch", llama, "--method", method, "--factor", 4, *PATCHES[method], "-o", folder).code == 0
    (folder / "ropecli.yaml").unlink()
    report = inspected(folder)
    assert (report["method"], report["factor"]) == (method, 4.0)
    assert_live(report, live(folder, 256))


@pytest.mark.transformers("5.9", "yarn by layer type is not read")
def test_the_layer_type_that_sees_far_stands_for_all(build, ropecli, inspected, live, tmp_path):
    gemma = build("gemma3_text", head_dim=32, layer_types=LAYERS, sliding_window=32)
    folder = tmp_path / "out"
    assert ropecli("patch", gemma, "--method", "yarn", "--factor", 4, "-o", folder).code == 0
    report = inspected(folder)
    by_layer_type = {rope["layer_type"]: rope for rope in report["ropes"]}
    assert (report["method"], report["factor"], report["rope_theta"]) == ("yarn", 4.0, 1e6)
    assert (by_layer_type["sliding_attention"]["method"], by_layer_type["sliding_attention"]["factor"]) == ("none", 1.0)
    for layer_type, rope in by_layer_type.items():
        assert_live(rope, live(folder, 256, layer_type))


def test_the_table_names_what_it_shows(llama, ropecli, tmp_path):
    folder = tmp_path / "out"
    assert ropecli("patch", llama, "--method", "yarn", "--factor", 4, "-o", folder).code == 0
    outcome = ropecli("inspect", folder)
    assert outcome.code == 0
    assert "(llama)" in outcome.out
    lines = [[cell.strip() for cell in line.split("│")] for line in outcome.out.splitlines() if "│" in line]
    rows = {name: value for _, name, value, _ in lines}
    assert rows["head_dim"] == rows["rotary_dim"] == "32"
    assert rows["rope_theta"] == "10,000"
    assert rows["method"] == "yarn"
    assert rows["factor"] == "4"
    assert rows["attention_factor"] == "1.13863"  # 1 + 0.1 ln 4
    assert (rows["pretraining length"], rows["pretraining length from"]) == ("64 tokens", "ropecli.yaml")
    assert rows["context length"] == "256 tokens"
    assert rows["max_position_embeddings"] == "256 tokens"
    assert rows["tokenizer model_max_length"] == "256 tokens"


def test_a_name_that_looks_like_markup_is_shown_as_it_is(llama, ropecli, tmp_path):
    folder = tmp_path / "a[bold]b[x]:heart:"
    shutil.copytree(llama, folder)
    outcome = ropecli("inspect", folder)
    assert outcome.code == 0
    assert f"{folder}(llama)" in "".join(outcome.out.split()), "the title may be wrapped"
    (folder / "config.json").unlink()
    outcome = ropecli("inspect", folder)
    assert outcome == (2, "", f"error: {folder}: no config.json in {folder}. Choose a folder with a checkpoint.\n")


def test_what_the_config_leaves_open_is_found(llama, edited, ropecli, inspected):
    folder = edited(llama, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
    report = inspected(folder)
    (warning,) = report["warnings"]
    assert "--original-length" in warning
    assert {"rule": "unclear", "message": warning, "fix": report["findings"][0]["fix"]} == report["findings"][0]
    assert report["findings"][0]["fix"].endswith("--method linear --factor 2 --original-length N --output DIR")
    outcome = ropecli("inspect", folder)
    assert (outcome.code, outcome.err) == (0, "")
    assert f"unclear: {warning}" in outcome.out.replace("\n", " ")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "cannot be read as JSON"),
        ("{}", "no RoPE field that ropecli knows"),
        ('{"rope_theta": 10000.0, "max_position_embeddings": 64}', "hidden_size"),
        (
            '{"rope_theta": 1e4, "rope_scaling": {"type": "xdrope"}, "max_position_embeddings": 64, "head_dim": 8}',
            "xdrope",
        ),
    ],
)
def test_a_config_that_cannot_be_used_is_refused_by_name(text, named, ropecli, tmp_path):
    (tmp_path / "config.json").write_text(text)
    outcome = ropecli("inspect", tmp_path, "--json")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("error:")
    assert named in outcome.err


# How long a context the frequencies support.


@pytest.fixture
def configured(tmp_path):
    """configured(key=value, ...) -> the folder of a config.json alone, of Llama 2's geometry."""

    def write(**values):
        config = {"model_type": "llama", "head_dim": 128, "max_position_embeddings": 4096, "rope_theta": 1e4, **values}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write


def said(outcome) -> str:
    assert (outcome.code, outcome.err) == (0, "")
    return " ".join(outcome.out.split())


def first_negative(inv_freq: np.ndarray, longest: int) -> int:
    scores = np.cos(np.multiply.outer(np.arange(longest), inv_freq)).sum(axis=1)
    return int(np.flatnonzero(scores < 0)[0])


def test_a_base_that_falls_short_of_its_window(configured, inspected, ropecli):
    from ropecli.analysis.base_bound import smallest_base
    from ropecli.rope import RopeGeometry

    report = inspected(configured())
    assert report["supported_length"] == first_negative(np.array(report["inv_freq"]), 4096) - 1
    assert report["smallest_base"] == smallest_base(RopeGeometry(128, 128, 1e4, 4096), 4096)
    assert "No problems found" in said(ropecli("inspect", configured()))


def test_of_a_scaled_checkpoint_the_frequencies_in_effect_are_reported(configured, inspected):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    folder = configured(max_position_embeddings=16384, rope_scaling=yarn)
    report = inspected(folder)
    assert report["supported_length"] == first_negative(np.array(report["inv_freq"]), 16384) - 1


def test_of_a_remapped_checkpoint_the_distances_are_reported(llama, ropecli, inspected, tmp_path):
    arguments = ["--method", "rerope", "--factor", 4, "--set", "window=48", "--no-verify", "-o", tmp_path / "out"]
    assert ropecli("patch", llama, *arguments).code == 0
    report = inspected(tmp_path / "out")
    assert (report["remaps"], report["largest_distance"], report["target_length"]) == (True, 48, 256)
