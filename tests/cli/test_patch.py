"""`ropecli patch` as a user calls it: what it writes, says, and leaves alone."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import yaml
from filelock import FileLock

from ropecli.checkpoint import writing
from ropecli.checkpoint.opening import open_checkpoint

LINEAR = ["--method", "linear", "--factor", 4]
YARN = ["--method", "yarn", "--factor", 4]


@pytest.fixture
def patch(ropecli, tmp_path):
    """patch(source, "--method", "yarn", ...) -> the folder written."""

    def call(checkpoint: Path, *arguments: object) -> Path:
        output = tmp_path / f"out-{len(list(tmp_path.glob('out-*')))}"
        ropecli("patch", checkpoint, *arguments, "-o", output).succeeds()
        return output

    return call


@pytest.fixture
def refused(ropecli, tmp_path, contents):
    """refused(checkpoint, ...) -> the outcome of a patch that is refused and changes nothing on disk."""

    def call(*arguments: object):
        before = contents(tmp_path)
        outcome = ropecli("patch", *arguments)
        outcome.is_refused()
        assert contents(tmp_path) == before
        return outcome

    return call


# What is written.


def test_weights_are_hard_linked_where_possible_and_copied_on_request(patch, source, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    weights = source / "model.safetensors"
    assert (patch(source, *LINEAR) / "model.safetensors").samefile(weights)
    copied = [patch(source, *LINEAR, "--weights", "copy")]
    monkeypatch.setattr(os, "link", refuse)
    copied.append(patch(source, *LINEAR))
    for folder in copied:
        assert not (folder / "model.safetensors").samefile(weights)
        assert (folder / "model.safetensors").read_bytes() == weights.read_bytes()


def test_editing_the_small_files_does_not_touch_the_source(patch, source, contents):
    before = contents(source)
    small = [path for path in patch(source, *LINEAR).iterdir() if path.suffix != ".safetensors"]
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= {path.name for path in small}
    for path in small:
        with path.open("ab") as file:  # in place, as an editor may
            file.write(b" ")
    assert contents(source) == before


def test_files_that_are_no_part_of_a_checkpoint_stay_behind(patch, source):
    others = ("optimizer.pt", "pytorch_model.bin", "run.sh", "modeling_own.py", ".hidden")
    for name in (*others, "LICENSE"):
        (source / name).write_text("x")
    (source / "checkpoint-10").mkdir()
    names = {path.name for path in patch(source, *LINEAR).iterdir()}
    assert not names & {*others, "checkpoint-10"}
    assert "LICENSE" in names


def test_what_engines_read_in_place_of_config_json_stays_behind(ropecli, source, tmp_path):
    """vLLM takes params.json first where consolidated*.safetensors is. The linked weights are those of config.json."""
    shutil.copy(source / "model.safetensors", source / "consolidated.safetensors")
    (source / "params.json").write_text('{"max_position_embeddings": 64}')
    names = "consolidated.safetensors, params.json"
    sentence = f"skipping {names}, which engines such as vLLM read instead of config.json and its weights"
    for words in (["--dry-run"], ["-o", tmp_path / "out"], ["-o", tmp_path / "again"]):
        outcome = ropecli("patch", tmp_path / "out" if "again" in str(words) else source, *YARN, *words).succeeds()
        assert outcome.said.count(sentence) == ("again" not in str(words))
    for folder in (tmp_path / "out", tmp_path / "again"):
        written = {path.name for path in folder.iterdir()}
        assert written == {path.name for path in source.iterdir()} - set(names.split(", ")) | {"ropecli.yaml"}
    ropecli("revert", tmp_path / "again", "-o", tmp_path / "before").succeeds()
    assert not (tmp_path / "before" / "ropecli.yaml").exists()
    (source / "model.safetensors").unlink()
    ropecli("patch", source, *YARN, "-o", tmp_path / "none").is_refused("is in Mistral's own format")


def test_code_that_only_the_tokenizer_names_is_copied(patch, source):
    (source / "tokenization_own.py").write_text("x")
    path = source / "tokenizer_config.json"
    own = {"auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **own}))
    assert (patch(source, *LINEAR) / "tokenization_own.py").read_text() == "x"


@pytest.mark.parametrize(("before", "after"), [(64, 256), (1000, 1000), (None, None)])
def test_the_tokenizers_cap_is_raised_to_the_context_length_and_never_lowered(before, after, patch, source):
    path = source / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": before}))
    output = patch(source, *LINEAR, "--no-verify")
    assert json.loads((output / "tokenizer_config.json").read_text())["model_max_length"] == after


def test_any_name_works_for_source_and_output(ropecli, source, tmp_path):
    name = "-a[bold] ünï*.x"
    odd = source.rename(tmp_path / name)
    outcome = ropecli("patch", odd, *LINEAR, "--no-verify", "-o", tmp_path / f"{name}2").succeeds()
    assert str(tmp_path / f"{name}2") in outcome.out
    assert yaml.safe_load((tmp_path / f"{name}2" / "ropecli.yaml").read_text())["source"]["checkpoint"] == str(odd)


def test_the_record_says_what_was_done_to_what(patch, source, config_of):
    output = patch(source, "--method", "yarn", "--target-length", 256, "--set", "beta_fast=8")
    record = yaml.safe_load((output / "ropecli.yaml").read_text())
    assert record["source"]["checkpoint"] == str(source)
    assert record["source"]["digest"] == open_checkpoint(source).digest
    assert (record["original_max_position_embeddings"], record["target_length"]) == (64, 256)
    scaling = {"method": "yarn", "factor": 4.0, "params": {"beta_fast": 8}}
    assert scaling.items() <= record["scaling"].items()
    changes = {change["path"]: (change["before"], change["after"]) for change in record["changes"]}
    assert changes["max_position_embeddings"] == (64, 256)
    assert changes["rope_parameters.rope_type"] == ("default", "yarn")
    before, after = config_of(source), config_of(output)
    assert {path.split(".")[0] for path in changes} == {key for key in after if after[key] != before.get(key)}


def test_a_dry_run_shows_the_changes_and_writes_nothing(ropecli, source, tmp_path, contents):
    before = contents(tmp_path)
    outcome = ropecli("patch", source, *YARN, "--dry-run", "-o", tmp_path / "out").succeeds()
    assert contents(tmp_path) == before
    assert "max_position_embeddings - 64 + 256" in outcome.printed
    assert 'rope_parameters.rope_type - "default" + "yarn"' in outcome.printed


@pytest.mark.parametrize("dry", [False, True])
def test_json_is_alone_on_standard_output(dry, ropecli, source, tmp_path):
    output = tmp_path / "out"
    options = ["--dry-run"] if dry else []
    outcome = ropecli("patch", source, "--method", "ntk", "--factor", 4, "--json", *options, "-o", output)
    result = outcome.json()
    assert result["output"] == (None if dry else str(output))
    assert (result["method"], result["factor"], result["target_length"]) == ("ntk", 4.0, 256)
    assert result["proved_tables"] == 1
    assert {"path": "max_position_embeddings", "before": 64, "after": 256} in result["changes"]
    assert output.exists() is not dry
    (finding,) = result["findings"]
    assert finding["message"] in outcome.said


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        ("ntk --factor 4", "ropecli.yaml"),
        ("dynamic --factor 4", "KV cache"),
        ("none --factor 4", "method none does not scale"),
        ("p-rope --factor 4 --set p=1", "p-rope with these parameters does not change any frequency"),
        ("linear --factor 4 --original-length 100000", "--original-length 100000 is above max_position_embeddings, 64"),
    ],
)
def test_warnings(options, warning, ropecli, source):
    outcome = ropecli("patch", source, "--method", *options.split(), "--dry-run").succeeds()
    assert "warning:" in outcome.err
    assert warning in outcome.said


def test_a_patch_that_shortens_the_context_is_warned_of(ropecli, llama, edited):
    rope = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
    shipped = edited(llama, max_position_embeddings=2048, rope_parameters=rope)
    outcome = ropecli("patch", shipped, *YARN, "--dry-run")
    assert "this shortens the context" in outcome.err
    assert "--target-length 2048" in outcome.err
    assert "shortens" not in ropecli("patch", shipped, "--method", "yarn", "--factor", 32, "--dry-run").err


# Links, and what earlier runs left.


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_as_output_is_followed(ropecli, source, tmp_path, exists):
    if exists:
        (tmp_path / "large").mkdir()
    (tmp_path / "out").symlink_to("large")
    ropecli("patch", source, *LINEAR, "--no-verify", "-o", tmp_path / "out").succeeds()
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "large" / "config.json").is_file()


def test_a_killed_run_is_replaced_and_a_running_one_is_not(ropecli, refused, source, tmp_path):
    partial = tmp_path / ".out.partial"
    partial.mkdir()
    (partial / "left.safetensors").write_bytes(b"x")
    patch = (source, *LINEAR, "--no-verify", "-o", tmp_path / "out")
    with FileLock(tmp_path / ".out.lock"):
        assert "out is in use by another run" in refused(*patch).err
    ropecli("patch", *patch).succeeds()
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}
    assert not (tmp_path / "out" / "left.safetensors").exists()


# What cannot be written.


@pytest.mark.parametrize("output", [".", "", "../here"])
def test_the_current_folder_cannot_be_the_output(refused, source, tmp_path, monkeypatch, output):
    """Nothing can be renamed to it."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert "is the current folder or a mount point" in refused(source, *YARN, "-o", output).err


@pytest.mark.parametrize("where", ["weights", "config.json", "rename"])
def test_a_full_disk_leaves_nothing(where, refused, source, tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write = Path.write_text
    if where == "weights":
        monkeypatch.setattr(os, "link", full)
        monkeypatch.setattr(shutil, "copyfile", full)
    elif where == "rename":
        monkeypatch.setattr(Path, "replace", full)
    else:
        monkeypatch.setattr(
            Path, "write_text", lambda self, *a, **k: full() if self.name == where else write(self, *a, **k)
        )
    assert "No space left on device" in refused(source, *YARN, "--no-verify", "-o", tmp_path / "out").err


def test_an_interruption_leaves_nothing(ropecli, source, tmp_path, monkeypatch, contents):
    def interrupted(*arguments, **options):
        assert (tmp_path / ".out.partial" / "config.json").exists(), "the test interrupts before anything was written"
        raise KeyboardInterrupt

    monkeypatch.setattr(writing, "place", interrupted)
    before = contents(tmp_path)
    outcome = ropecli("patch", source, *YARN, "--no-verify", "-o", tmp_path / "out")
    assert outcome == (130, "", "error: Interrupted.\n")
    assert contents(tmp_path) == before
