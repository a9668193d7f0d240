"""`ropecli patch` as a user calls it: what it refuses, with one message and nothing left on disk."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ropecli.checkpoint import writing
from ropecli.config.families import Family


@pytest.fixture
def refused(ropecli, tmp_path, contents):
    """refused("CHECKPOINT", ...) -> the one message of a call with exit status 2 that changed nothing on disk."""

    def call(*arguments: object) -> str:
        before = contents(tmp_path)
        outcome = ropecli("patch", *arguments)
        assert outcome.code == 2, outcome
        assert outcome.out == ""
        assert outcome.err.count("error:") == 1
        assert "Traceback" not in outcome.err
        assert contents(tmp_path) == before
        return outcome.err

    return call


# Checkpoints that are none.


def test_a_missing_folder(refused, tmp_path):
    assert "No folder" in refused(tmp_path / "missing", "--method", "yarn", "--factor", 4, "-o", tmp_path / "out")


def test_a_file_in_place_of_a_folder(refused, source, tmp_path):
    message = refused(source / "config.json", "--method", "yarn", "--factor", 4, "-o", tmp_path / "out")
    assert "expected a folder with config.json" in message


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (b"\xff\xfe", "cannot be read as JSON"),
        ("[1, 2]", "expected an object"),
    ],
    ids=["utf16", "list"],
)
def test_a_config_that_is_no_json_object(text, named, refused, source, tmp_path):
    (source / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    message = refused(source, "--method", "yarn", "--factor", 4, "-o", tmp_path / "out")
    assert named in message
    assert "config.json" in message


def test_a_model_without_rope(refused, source, tmp_path):
    config = {"model_type": "gpt2", "n_embd": 64, "n_head": 2, "n_layer": 2, "n_positions": 64, "vocab_size": 512}
    (source / "config.json").write_text(json.dumps(config))
    message = refused(source, "--method", "yarn", "--factor", 4, "-o", tmp_path / "out")
    assert "'gpt2' has no rotary position embedding" in message


# Weights.


def test_no_weights(refused, source, tmp_path):
    (source / "model.safetensors").unlink()
    assert "no *.safetensors weights" in refused(source, "--method", "yarn", "--factor", 4, "-o", tmp_path / "out")


def test_a_shard_that_the_index_names_and_the_folder_has_not(refused, source, tmp_path):
    weights = {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    message = refused(source, "--method", "yarn", "--factor", 4, "-o", tmp_path / "out")
    assert "lists model-00002-of-00002.safetensors" in message


def test_an_index_that_names_no_weights(refused, source, tmp_path):
    (source / "model.safetensors.index.json").write_text("{}")
    message = refused(source, "--method", "yarn", "--factor", 4, "--no-verify", "-o", tmp_path / "out")
    assert "model.safetensors.index.json" in message
    assert "weight_map is missing or not an object" in message


def test_weights_that_git_lfs_did_not_fetch(refused, source, tmp_path):
    (source / "model.safetensors").unlink()
    (source / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    message = refused(source, "--method", "yarn", "--factor", 4, "--no-verify", "-o", tmp_path / "out")
    assert f"{source / 'model.safetensors'} is damaged or not a safetensors file" in message
    assert "Download or copy it again" in message


# Methods, factors and parameters.


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--method", "yran", "--factor", 4], "Did you mean 'yarn'?"),
        (["--method", "yarn", "--factor", 4, "--set", "betafast=8"], "Did you mean 'beta_fast'?"),
        (["--method", "yarn", "--factor", 4, "--set", "beta_fast"], "KEY=VALUE"),
        (["--method", "yarn", "--factor", 4, "--set", "beta_fast=many"], "beta_fast is 'many'"),
        (
            ["--method", "yarn", "--factor", 4, "--set", "beta_fast=0.5"],
            "beta_fast is 0.5; expected at least beta_slow",
        ),
        (
            ["--method", "yarn", "--factor", 4, "--set", "beta_fast=8", "--set", "beta_fast=16"],
            "beta_fast was given twice",
        ),
        (["--method", "yarn", "--factor", 1e7], "from 1 to 1000000"),
        (["--method", "yarn"], "needs --factor or --target-length"),
        (["--method", "yarn", "--target-length", 63], "below the pretraining length, 64"),
        (["--method", "abf", "--factor", 4], "neither"),
        (["--method", "longrope", "--factor", 4], "long_factor"),
        (["--method", "yarn", "--factor", 4, "--weights", "bogus"], "'link' or 'copy'"),
    ],
    ids=lambda value: " ".join(map(str, value[1:])) if isinstance(value, list) else "",
)
def test_what_is_asked_for_must_make_sense(arguments, named, refused, source, tmp_path):
    assert named in refused(source, *arguments, "-o", tmp_path / "out")


# Outputs.


def test_no_output(refused, source):
    assert "--output" in refused(source, "--method", "yarn", "--factor", 4)


def test_an_output_that_holds_something(refused, source, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kept").write_text("kept")
    assert "not empty" in refused(source, "--method", "yarn", "--factor", 4, "-o", tmp_path / "out")


@pytest.mark.parametrize("output", [".", "", "../here"])
def test_the_current_folder_as_output(refused, source, tmp_path, monkeypatch, output):
    """Nothing can be renamed to it; that is said before anything is read."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    message = refused(source / "missing", "--method", "yarn", "--factor", 4, "-o", output)
    assert "is the current folder or a mount point" in message


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounts a file system")
def test_a_mount_point_as_output(refused, source, tmp_path):
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", mounted], capture_output=True).returncode:
        pytest.skip("may not mount here")
    try:
        message = refused(source / "missing", "--method", "yarn", "--factor", 4, "-o", mounted)
        assert f"--output {mounted / 'checkpoint'}" in message
    finally:
        subprocess.run(["umount", mounted], check=True)


@pytest.mark.parametrize("method", ["yarn", "rerope"])
def test_no_temporary_folder_is_named(method, refused, edited, llama, tmp_path):
    """transformers says where it read: the folder that is filled, or one for a config alone."""
    message = refused(edited(llama, model_type=...), "--method", method, "--factor", 4, "-o", tmp_path / "out")
    where = f"Unrecognized model in {tmp_path / 'out'}." if method == "yarn" else "Unrecognized model in this folder."
    assert where in " ".join(message.split())


@pytest.mark.parametrize("output", ["out", "parent/of/out"])
def test_a_patch_that_the_model_does_not_take(output, refused, llama, edited, tmp_path, contents, monkeypatch):
    """An OPT in a Llama's clothes has no table; the proof finds that out after config.json was written.

    The parents that were made for the output go with it.
    """
    source = edited(llama, "source", model_type="opt", ffn_dim=64, word_embed_proj_dim=64)
    monkeypatch.setattr("ropecli.config.settings.family_of", lambda config: Family("opt"))
    before = contents(source)
    assert "no rotary table" in refused(source, "--method", "yarn", "--factor", 4, "-o", tmp_path / output)
    assert contents(source) == before
    shutil.rmtree(source)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["weights", "config.json", "rename"])
def test_a_full_disk_leaves_nothing(where, refused, source, tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if where == "weights":
        monkeypatch.setattr(os, "link", full)
        monkeypatch.setattr(shutil, "copyfile", full)
    elif where == "rename":
        monkeypatch.setattr(Path, "replace", full)
    else:
        write = Path.write_text
        monkeypatch.setattr(
            Path, "write_text", lambda self, *a, **k: full() if self.name == where else write(self, *a, **k)
        )
    message = refused(source, "--method", "yarn", "--factor", 4, "--no-verify", "-o", tmp_path / "out")
    assert "No space left on device" in message


def test_an_interruption_is_said_and_leaves_nothing(ropecli, source, tmp_path, monkeypatch, contents):
    def interrupted(*arguments, **options):
        assert list(tmp_path.glob(".out.partial-*")), "the test interrupts before anything was written"
        raise KeyboardInterrupt

    monkeypatch.setattr(writing, "place", interrupted)
    before = contents(tmp_path)
    outcome = ropecli("patch", source, "--method", "yarn", "--factor", 4, "--no-verify", "-o", tmp_path / "out")
    assert outcome == (130, "", "error: interrupted\n")
    assert contents(tmp_path) == before
