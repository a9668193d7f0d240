"""`ropecli revert`: the checkpoint as it was before its patches, however many there were."""

import json
from pathlib import Path

import pytest
import yaml

METHODS = {
    "yarn": ["--method", "yarn", "--factor", 4],
    "longrope": ["--method", "longrope", "--factor", 4, "--set", f"long_factor={[1.0 + i / 4 for i in range(16)]}"],
    "none": ["--method", "none"],
}


@pytest.fixture
def patch(ropecli, tmp_path):
    """patch(checkpoint, "--method", ...) -> the folder written, not proved."""

    def call(checkpoint: Path, *options: object) -> Path:
        output = tmp_path / f"patched-{len(list(tmp_path.glob('patched-*')))}"
        outcome = ropecli("patch", checkpoint, *options, "--no-verify", "-o", output)
        assert outcome.code == 0, outcome.err
        return output

    return call


@pytest.fixture
def revert(ropecli, tmp_path):
    """revert(checkpoint) -> (the folder written, standard error)."""

    def call(checkpoint: Path) -> tuple[Path, str]:
        outcome = ropecli("revert", checkpoint, "-o", tmp_path / "reverted")
        assert outcome.code == 0, outcome.err
        return tmp_path / "reverted", outcome.err

    return call


def json_of(folder: Path, name: str = "config.json") -> str:
    """A JSON file with sorted keys, as text, which tells 1 from 1.0."""
    return json.dumps(json.loads((folder / name).read_text()), sort_keys=True)


def set_keys(path: Path, **values: object) -> None:
    """Set keys of a JSON or YAML file; a value of ... removes."""
    content = {**yaml.safe_load(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


@pytest.mark.parametrize("method", METHODS)
def test_revert_restores_the_whole_folder(method, llama, patch, revert):
    reverted, warnings = revert(patch(llama, *METHODS[method]))
    assert warnings == ""
    assert {path.name for path in reverted.iterdir()} == {path.name for path in llama.iterdir()}
    for path in llama.iterdir():
        if path.suffix == ".json":
            assert json_of(reverted, path.name) == json_of(llama, path.name)
        else:
            assert (reverted / path.name).samefile(path) == (path.suffix == ".safetensors")
            assert (reverted / path.name).read_bytes() == path.read_bytes()


def test_every_key_is_restored(llama, edited, patch, revert):
    """Also keys that a patch replaces or removes, and numbers that were written as integers."""
    llama3 = {"rope_type": "llama3", "low_freq_factor": 1, "high_freq_factor": 4, "factor": 2.0}
    odd = {"b": [1, {"z": 1, "a": None}], "a": 1e-05}
    lengths = {"original_max_position_embeddings": 32, "rope_theta": 500000}
    source = edited(llama, rope_parameters=llama3, odd=odd, **lengths)
    reverted, _ = revert(patch(patch(source, *METHODS["longrope"]), "--method", "linear", "--factor", 2))
    assert json_of(reverted) == json_of(source)


def test_an_edited_length_of_the_tokenizer_stays(llama, patch, revert):
    patched = patch(llama, *METHODS["yarn"])
    set_keys(patched / "tokenizer_config.json", model_max_length=100)
    reverted, _ = revert(patched)
    assert json.loads((reverted / "tokenizer_config.json").read_text())["model_max_length"] == 100


def test_the_record_of_an_earlier_finetuning_stays(llama, edited, patch, revert):
    training = {"source": {"checkpoint": "x"}, "length": 256, "recipe": {"steps": 1}}
    source = edited(llama)
    (source / "ropecli.yaml").write_text(yaml.safe_dump({"finetuned": training}))
    reverted, warnings = revert(patch(source, *METHODS["yarn"]))
    assert yaml.safe_load((reverted / "ropecli.yaml").read_text()) == {"finetuned": training}
    assert warnings == ""
    assert json_of(reverted) == json_of(llama)


def test_a_dry_run_shows_the_changes_and_writes_nothing(llama, patch, ropecli, tmp_path):
    patched = patch(llama, *METHODS["yarn"])
    result = json.loads(ropecli("revert", patched, "--dry-run", "-o", tmp_path / "reverted", "--json").out)
    assert {"path": "max_position_embeddings", "before": 256, "after": 64} in result["changes"]
    assert result["tokenizer_changes"] == [{"path": "model_max_length", "before": 256, "after": 64}]
    assert not (tmp_path / "reverted").exists()


REFUSED = {
    "only trained": ("ropecli.yaml", "finetuned: {}\n", "has no ropecli.yaml with a patch to revert"),
    "edited": (
        "config.json",
        {"max_position_embeddings": 512},
        "config.json was edited after ropecli.yaml was written",
    ),
    "damaged": ("ropecli.yaml", {"changes": [{"path": "a"}]}, "ropecli.yaml cannot be read"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_patch_with_an_unknown_original_is_not_reverted(case, llama, patch, ropecli, tmp_path):
    name, change, message = REFUSED[case]
    patched = patch(llama, *METHODS["yarn"])
    if isinstance(change, str):
        (patched / name).write_text(change)
    else:
        set_keys(patched / name, **change)
    outcome = ropecli("revert", patched, "-o", tmp_path / "reverted")
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.err
    assert not (tmp_path / "reverted").exists()
