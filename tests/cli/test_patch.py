"""`ropecli patch` as a user calls it: what it writes, what it says, and what it leaves alone."""

import errno
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ropecli.checkpoint.opening import open_checkpoint


@pytest.fixture
def patch(ropecli, tmp_path):
    """patch(source, "--method", "yarn", ...) -> the folder written."""

    def call(checkpoint: Path, *arguments: object) -> Path:
        output = tmp_path / f"out-{len(list(tmp_path.glob('out-*')))}"
        outcome = ropecli("patch", checkpoint, *arguments, "-o", output)
        assert outcome.code == 0, outcome.err
        return output

    return call


def test_a_terminal_without_the_times_sign_gets_the_rest(source, tmp_path):
    arguments = ["patch", source, "--method", "linear", "--factor", "4", "--no-verify", "-o", tmp_path / "out"]
    done = subprocess.run(
        [sys.executable, "-m", "ropecli", *arguments],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "-> " in done.stdout
    assert "linear x4, 256 tokens" in done.stdout


def test_weights_are_hard_linked_and_copied_where_asked(patch, source):
    linked = patch(source, "--method", "linear", "--factor", 4)
    assert (linked / "model.safetensors").samefile(source / "model.safetensors")
    output = patch(source, "--method", "linear", "--factor", 4, "--weights", "copy")
    assert not (output / "model.safetensors").samefile(source / "model.safetensors")
    assert (output / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_weights_are_copied_where_the_file_system_has_no_links(patch, source, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refuse)
    output = patch(source, "--method", "linear", "--factor", 4)
    assert (output / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_editing_the_small_files_does_not_touch_the_source(patch, source, contents):
    before = contents(source)
    output = patch(source, "--method", "linear", "--factor", 4)
    small = [path for path in output.iterdir() if path.suffix != ".safetensors"]
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= {path.name for path in small}
    for path in small:
        with path.open("ab") as file:  # in place, as an editor may
            file.write(b" ")
    assert contents(source) == before


def test_files_that_are_no_part_of_a_checkpoint_stay_behind(patch, source):
    for name in ("optimizer.pt", "pytorch_model.bin", "run.sh", "modeling_own.py", ".hidden"):
        (source / name).write_text("x")
    (source / "checkpoint-10").mkdir()
    (source / "LICENSE").write_text("x")
    names = {path.name for path in patch(source, "--method", "linear", "--factor", 4).iterdir()}
    assert not names & {"optimizer.pt", "pytorch_model.bin", "run.sh", "modeling_own.py", ".hidden", "checkpoint-10"}
    assert "LICENSE" in names


def test_code_that_only_the_tokenizer_names_travels(patch, source):
    (source / "tokenization_own.py").write_text("x")
    path = source / "tokenizer_config.json"
    own = {"auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **own}))
    output = patch(source, "--method", "linear", "--factor", 4)
    assert (output / "tokenization_own.py").read_text() == "x"


@pytest.mark.parametrize(("before", "after"), [(64, 256), (1000, 1000), (None, None)])
def test_the_tokenizers_cap_is_raised_to_the_window_and_never_lowered(before, after, patch, source):
    path = source / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": before}))
    output = patch(source, "--method", "linear", "--factor", 4, "--no-verify")
    assert json.loads((output / "tokenizer_config.json").read_text())["model_max_length"] == after


def test_any_name_does_for_source_and_output(ropecli, source, tmp_path):
    name = "-a[bold] ünï*.x"
    odd = source.rename(tmp_path / name)
    outcome = ropecli("patch", odd, "--method", "linear", "--factor", 4, "--no-verify", "-o", tmp_path / f"{name}2")
    assert outcome.code == 0, outcome.err
    assert str(tmp_path / f"{name}2") in outcome.out
    assert yaml.safe_load((tmp_path / f"{name}2" / "ropecli.yaml").read_text())["source"]["checkpoint"] == str(odd)


def test_the_note_says_what_was_done_to_what(patch, source):
    output = patch(source, "--method", "yarn", "--target-length", 256, "--set", "beta_fast=8")
    text = (output / "ropecli.yaml").read_text()
    assert text.startswith("# ")
    note = yaml.safe_load(text)
    assert note["source"]["checkpoint"] == str(source)
    assert note["source"]["digest"] == open_checkpoint(source).digest()
    assert note["original_max_position_embeddings"] == 64
    assert note["target_length"] == 256
    assert note["scaling"]["method"] == "yarn"
    assert note["scaling"]["factor"] == 4.0
    assert note["scaling"]["params"] == {"beta_fast": 8}
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, output))
    changes = {change["path"]: (change["before"], change["after"]) for change in note["changes"]}
    assert changes["max_position_embeddings"] == (64, 256)
    assert changes["rope_parameters.rope_type"] == ("default", "yarn")
    assert {path.split(".")[0] for path in changes} == {key for key in after if after[key] != before.get(key)}


def test_a_dry_run_shows_the_changes_and_writes_nothing(ropecli, source, tmp_path, contents):
    before = contents(tmp_path)
    outcome = ropecli("patch", source, "--method", "yarn", "--factor", 4, "--dry-run", "-o", tmp_path / "out")
    assert outcome.code == 0
    assert contents(tmp_path) == before
    lines = [line.strip() for line in outcome.out.splitlines()]
    at = lines.index("max_position_embeddings")
    assert lines[at + 1 : at + 3] == ["- 64", "+ 256"]
    at = lines.index("rope_parameters.rope_type")
    assert lines[at + 1 : at + 3] == ['- "default"', '+ "yarn"']


@pytest.mark.parametrize("dry", [False, True])
def test_json_is_alone_on_standard_output(dry, ropecli, source, tmp_path):
    arguments = ["--dry-run"] if dry else []
    output = tmp_path / "out"
    outcome = ropecli("patch", source, "--method", "ntk", "--factor", 4, "--json", *arguments, "-o", output)
    assert outcome.code == 0
    result = json.loads(outcome.out)
    assert result["output"] == (None if dry else str(output))
    assert (result["method"], result["factor"], result["target_length"]) == ("ntk", 4.0, 256)
    assert result["proved_tables"] == 1
    assert {"path": "max_position_embeddings", "before": 64, "after": 256} in result["changes"]
    assert output.exists() is not dry
    (warning,) = result["warnings"]
    assert warning in " ".join(outcome.err.split()), "what --json lists is said on standard error too"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--method", "ntk", "--factor", 4], "ropecli.yaml"),
        (["--method", "dynamic", "--factor", 4], "KV cache"),
        (["--method", "none", "--factor", 4], "method none does not scale"),
        (["--method", "abf", "--factor", 4, "--set", "rope_theta=100"], "100, is below the pretrained one, 10000"),
        (
            ["--method", "p-rope", "--factor", 4, "--set", "p=1"],
            "p-rope with these parameters does not change any frequency",
        ),
        (
            ["--method", "yarn", "--factor", 2, "--target-length", 256],
            "factor 2 reaches 128 tokens; 256 tokens require factor 4 (pretraining length 64)",
        ),
        (
            ["--method", "linear", "--factor", 4, "--original-length", 100_000],
            "--original-length 100000 is above max_position_embeddings, 64",
        ),
    ],
)
def test_what_the_user_should_know_is_said_on_standard_error(arguments, named, ropecli, source):
    outcome = ropecli("patch", source, *arguments, "--dry-run")
    assert outcome.code == 0
    assert "warning:" in outcome.err
    assert named in outcome.err


def test_a_sliding_window_below_the_target_is_said(ropecli, build):
    mistral = build("mistral", head_dim=32, sliding_window=32)
    outcome = ropecli("patch", mistral, "--method", "yarn", "--factor", 4, "--dry-run")
    assert "sliding_window is 32" in outcome.err


# Links.


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_as_output_is_followed(ropecli, source, tmp_path, exists):
    if exists:
        (tmp_path / "large").mkdir()
    (tmp_path / "out").symlink_to("large")
    outcome = ropecli("patch", source, "--method", "linear", "--factor", 4, "--no-verify", "-o", tmp_path / "out")
    assert outcome.code == 0, outcome.err
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "large" / "config.json").is_file()


# What earlier runs left.


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_what_a_dead_run_left_is_removed(patch, source, tmp_path):
    stale = tmp_path / f".out-0.partial-{platform.node()[:32]}-{dead_process()}-x1"
    stale.mkdir()
    (stale / "model.safetensors").write_bytes(b"x" * 1000)
    patch(source, "--method", "linear", "--factor", 4)
    assert not stale.exists()


def test_a_file_is_written_beside_the_users_own(ropecli, tmp_path):
    """Only what a dead run of this machine left is removed."""
    stale = tmp_path / f".plot.svg.partial-{platform.node()[:32]}-{dead_process()}-x1"
    kept = tmp_path / ".plot.svg.partial"
    for path in (stale, kept):
        path.write_text("kept")
    assert ropecli("plot", "demo", "--kind", "frequencies", "-o", tmp_path / "plot.svg").code == 0
    assert kept.read_text() == "kept"
    assert {path.name for path in tmp_path.iterdir()} == {kept.name, "plot.svg"}
    assert (tmp_path / "plot.svg").stat().st_mode == kept.stat().st_mode


@pytest.mark.parametrize(
    "name",
    [
        ".out-0.partial-{host}-{own}-x1",
        ".out-1.partial-{host}-{dead}-x1",
        ".out-0.partial-other-{dead}-x1",
    ],
)
def test_nothing_else_is_removed(name, ropecli, source, tmp_path):
    """This process is alive; what another output or another machine left is not ours."""
    processes = {"own": os.getpid(), "dead": dead_process()}
    other = tmp_path / name.format(host=platform.node()[:32], **processes)
    other.mkdir()
    (other / "kept").write_text("kept")
    assert (
        ropecli("patch", source, "--method", "linear", "--factor", 4, "--no-verify", "-o", tmp_path / "out-0").code == 0
    )
    assert (other / "kept").read_text() == "kept"
