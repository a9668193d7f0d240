"""`patch --revert`: the checkpoint as it was before its patches, however many there were."""

import json
from pathlib import Path

import pytest
import yaml

METHODS = {
    "yarn": ["--method", "yarn", "--factor", 4],
    "ntk": ["--method", "ntk", "--factor", 4],
    "dynamic": ["--method", "dynamic", "--factor", 4],
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
    """revert(checkpoint) -> (the folder written, what was said on standard error)."""

    def call(checkpoint: Path, *options: object) -> tuple[Path, str]:
        outcome = ropecli("patch", checkpoint, "--revert", "-o", tmp_path / "reverted", *options)
        assert outcome.code == 0, outcome.err
        return tmp_path / "reverted", outcome.err

    return call


@pytest.fixture
def refused(ropecli, tmp_path):
    def call(checkpoint: Path, *options: object) -> str:
        outcome = ropecli("patch", checkpoint, "--revert", "-o", tmp_path / "reverted", *options)
        assert (outcome.code, outcome.out) == (2, "")
        assert outcome.err.count("error:") == 1
        assert not (tmp_path / "reverted").exists()
        return outcome.err

    return call


def json_of(folder: Path, name: str = "config.json") -> list:
    """The pairs of a JSON object, in their order, at all depths."""
    return json.loads((folder / name).read_text(), object_pairs_hook=lambda pairs: pairs)


def rewrite(path: Path, **values: object) -> None:
    """Sets keys of a JSON object; a value of ... removes."""
    content = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def edit_note(folder: Path, **values: object) -> None:
    note = {**yaml.safe_load((folder / "ropecli.yaml").read_text()), **values}
    (folder / "ropecli.yaml").write_text(yaml.safe_dump({k: v for k, v in note.items() if v is not ...}))


@pytest.mark.parametrize("method", METHODS)
def test_the_whole_folder_is_as_it_was(method, llama, patch, revert):
    reverted, said = revert(patch(llama, *METHODS[method]))
    assert said == ""
    assert {path.name for path in reverted.iterdir()} == {path.name for path in llama.iterdir()}
    for path in llama.iterdir():
        if path.suffix == ".json":
            assert json_of(reverted, path.name) == json_of(llama, path.name)
        else:
            assert (reverted / path.name).read_bytes() == path.read_bytes()


def test_weights_are_linked_or_copied_as_a_patch_does(llama, patch, revert, ropecli, tmp_path):
    patched = patch(llama, *METHODS["yarn"])
    reverted, _ = revert(patched)
    assert (reverted / "model.safetensors").samefile(llama / "model.safetensors")
    assert ropecli("patch", patched, "--revert", "--weights", "copy", "-o", tmp_path / "copy").code == 0
    assert not (tmp_path / "copy" / "model.safetensors").samefile(llama / "model.safetensors")


@pytest.mark.parametrize(
    ("method", "config"),
    [
        ("yarn", {"rope_parameters": ..., "rope_scaling": None, "rope_theta": 1e4}),
        (
            "longrope",
            {
                "original_max_position_embeddings": 32,
                "rope_parameters": {"rope_type": "llama3", "low_freq_factor": 1, "high_freq_factor": 4, "factor": 2.0},
                "rope_theta": 500000,
                "odd": {"b": [1, {"z": 1, "a": None}], "a": 1e-05},
            },
        ),
    ],
)
def test_every_key_comes_back_in_its_place(method, config, llama, edited, patch, revert):
    """Also those that a patch replaces or removes, and numbers that were written as integers."""
    source = edited(llama, **config)
    reverted, _ = revert(patch(patch(source, *METHODS[method]), "--method", "linear", "--factor", 2))
    assert json_of(reverted) == json_of(source)
    plain = json.dumps(json.loads((source / "config.json").read_text()), indent=2) + "\n"
    assert (reverted / "config.json").read_text() == plain


# The tokenizer.


@pytest.mark.parametrize("length", [64, int(1e30), ...], ids=str)
def test_the_tokenizers_cap_is_as_it_was(length, llama, edited, patch, revert):
    source = edited(llama)
    rewrite(source / "tokenizer_config.json", model_max_length=length)
    reverted, said = revert(patch(patch(source, *METHODS["yarn"]), "--method", "linear", "--factor", 8))
    assert said == ""
    assert json_of(reverted, "tokenizer_config.json") == json_of(source, "tokenizer_config.json")


def test_a_cap_that_was_edited_since_stays(llama, patch, revert):
    patched = patch(llama, *METHODS["yarn"])
    rewrite(patched / "tokenizer_config.json", model_max_length=100)
    reverted, said = revert(patched)
    assert "model_max_length was edited after the patch, from 256 to 100" in said
    assert json.loads((reverted / "tokenizer_config.json").read_text())["model_max_length"] == 100


# What else is in the note.


@pytest.mark.parametrize("trained_first", [False, True])
def test_a_finetuning_is_kept_and_said(trained_first, llama, edited, patch, revert):
    training = {"source": {"checkpoint": "x"}, "length": 64 if trained_first else 256, "recipe": {"steps": 1}}
    if trained_first:
        source = edited(llama)
        (source / "ropecli.yaml").write_text(yaml.safe_dump({"finetuned": training}))
        patched = patch(source, *METHODS["yarn"])
    else:
        patched = patch(llama, *METHODS["yarn"])
        edit_note(patched, finetuned=training)
    reverted, said = revert(patched)
    assert yaml.safe_load((reverted / "ropecli.yaml").read_text()) == {"finetuned": training}
    assert ("the weights were fine-tuned with yarn ×4" in said) is not trained_first
    assert json_of(reverted) == json_of(llama)


# Looking first.


def test_a_dry_run_shows_the_changes_and_writes_nothing(llama, patch, ropecli, tmp_path):
    patched = patch(llama, *METHODS["yarn"])
    outcome = ropecli("patch", patched, "--revert", "--dry-run", "-o", tmp_path / "reverted")
    assert (outcome.code, outcome.err) == (0, "")
    assert not (tmp_path / "reverted").exists()
    lines = [line.strip() for line in outcome.out.splitlines()]
    for name, before, after in [("max_position_embeddings", 256, 64), ("model_max_length", 256, 64)]:
        at = lines.index(name)
        assert lines[at + 1 : at + 3] == [f"- {before}", f"+ {after}"]


def test_json_is_alone_on_standard_output(llama, patch, ropecli, tmp_path):
    patched, output = patch(llama, *METHODS["yarn"]), tmp_path / "reverted"
    outcome = ropecli("patch", patched, "--revert", "--json", "-o", output)
    result = json.loads(outcome.out)
    assert result["output"] == str(output)
    assert {"path": "max_position_embeddings", "before": 256, "after": 64} in result["changes"]
    assert result["tokenizer_changes"] == [{"path": "model_max_length", "before": 256, "after": 64}]
    assert result["warnings"] == []


# What is refused.


def test_a_checkpoint_that_was_never_patched(llama, edited, refused):
    assert "has no ropecli.yaml with a patch to revert" in refused(llama)
    source = edited(llama)
    (source / "ropecli.yaml").write_text("finetuned: {}\n")
    assert "has no ropecli.yaml with a patch to revert" in refused(source)


def test_a_config_that_was_edited_since(llama, patch, refused):
    patched = patch(llama, *METHODS["yarn"])
    rewrite(patched / "config.json", max_position_embeddings=512)
    message = refused(patched)
    assert "config.json was edited after ropecli.yaml was written (max_position_embeddings)" in message
    assert "Undo the edit" in message


def test_options_of_a_patch(llama, patch, refused):
    patched = patch(llama, *METHODS["yarn"])
    for option in (
        ["--method", "yarn"],
        ["--factor", 4],
        ["--set", "beta_fast=8"],
        ["--no-verify"],
    ):
        said = f"--revert undoes the patches and does not use {option[0]}."
        assert said in refused(patched, *option)


def test_neither_method_nor_revert(llama, ropecli):
    outcome = ropecli("patch", llama, "--factor", 4, "--dry-run")
    assert outcome.code == 2
    assert "patch needs --method" in outcome.err


def test_a_note_that_makes_no_sense(llama, patch, refused):
    patched = patch(llama, *METHODS["yarn"])
    whole = yaml.safe_load((patched / "ropecli.yaml").read_text())
    for note in (
        {"tokenizer": 5},
        {"key_order": {"": [["a"]]}},
        {"changes": [{"path": "architectures.x", "before": 1, "after": "<absent>"}]},
        {"changes": 5},
    ):
        edit_note(patched, **{**whole, **note})
        assert "ropecli.yaml cannot be read" in refused(patched), note
