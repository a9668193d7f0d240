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


YARN = ["--method", "yarn", "--factor", 4]
LONGROPE = ["--method", "longrope", "--factor", 4]
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_head": 2, "n_layer": 2, "n_positions": 64, "vocab_size": 512}
INDEX = {"metadata": {}, "weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
FACTORS = [1.0 + index / 4 for index in range(16)]
# a file to write in the checkpoint (None: none), its text (None: remove it), the options, part of the message
REFUSED = {
    "not UTF-8": ("config.json", b"\xff\xfe", YARN, "config.json cannot be read as JSON"),
    "a list": ("config.json", "[1, 2]", YARN, "expected an object"),
    "a model without rotary positions": ("config.json", GPT2, YARN, "'gpt2' has no rotary position embedding"),
    "no weights": ("model.safetensors", None, YARN, "no *.safetensors weights"),
    "a missing shard": ("model.safetensors.index.json", INDEX, YARN, "lists model-00002-of-00002.safetensors"),
    "an empty index": ("model.safetensors.index.json", {}, YARN, "weight_map is missing or not an object"),
    "a pointer of git-lfs": (
        "model.safetensors",
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        YARN,
        "model.safetensors is damaged or not a safetensors file",
    ),
    "an unknown method": (None, None, ["--method", "yran", "--factor", 4], "Did you mean 'yarn'?"),
    "an unknown parameter": (None, None, [*YARN, "--set", "betafast=8"], "Did you mean 'beta_fast'?"),
    "a parameter without a value": (None, None, [*YARN, "--set", "beta_fast"], "KEY=VALUE"),
    "a parameter of another type": (None, None, [*YARN, "--set", "beta_fast=many"], "beta_fast is 'many'"),
    "a parameter out of range": (
        None,
        None,
        [*YARN, "--set", "beta_fast=0.5"],
        "beta_fast is 0.5; expected at least beta_slow",
    ),
    "a parameter given twice": (
        None,
        None,
        [*YARN, "--set", "beta_fast=8", "--set", "beta_fast=16"],
        "beta_fast was given twice",
    ),
    "a factor out of range": (None, None, ["--method", "yarn", "--factor", 1e7], "from 1 to 1000000"),
    "no factor": (None, None, ["--method", "yarn"], "needs --factor or --target-length"),
    "no method": (None, None, ["--factor", 4], "patch needs --method"),
    "a short target": (
        None,
        None,
        ["--method", "yarn", "--target-length", 63],
        "63 is below the pretraining length, 64",
    ),
    "a method without its parameter": (None, None, ["--method", "abf", "--factor", 4], "neither"),
    "longrope without factors": (None, None, LONGROPE, "long_factor"),
    "a way to copy": (None, None, [*YARN, "--weights", "bogus"], "'link' or 'copy'"),
    "a method that only works in memory": (
        None,
        None,
        ["--method", "dynamic-yarn", "--factor", 4],
        "eval-ppl --method dynamic-yarn --factor 4",
    ),
    **{
        f"factors: {message}": ("factors.json", value, [*options, "--factors-file", "source/factors.json"], message)
        for options, value, message in [
            (LONGROPE, "[1, 2", "cannot be read as JSON"),
            (LONGROPE, [1.0, 2.0], "long_factor has 2 entries; this model has 16 rotary pairs"),
            (LONGROPE, {"factors": FACTORS}, "must hold a list of factors, or an object with long_factor"),
            (YARN, FACTORS, "--factors-file is for longrope and custom; yarn takes no list"),
        ]
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_checkpoints_and_options_are_refused(case, refused, source, tmp_path, monkeypatch):
    name, content, options, message = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    if name and content is None:
        (source / name).unlink()
    elif name:
        text = content if isinstance(content, bytes | str) else json.dumps(content)
        (source / name).unlink(missing_ok=True)
        (source / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert message in refused(source, *options, "-o", tmp_path / "out")


def test_no_checkpoint_and_no_output(refused, source, tmp_path):
    assert "No folder" in refused(tmp_path / "missing", *YARN, "-o", tmp_path / "out")
    assert "expected a folder with config.json" in refused(source / "config.json", *YARN, "-o", tmp_path / "out")
    assert "--output" in refused(source, *YARN)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kept").write_text("kept")
    assert "not empty" in refused(source, *YARN, "-o", tmp_path / "out")


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
