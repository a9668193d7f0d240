"""Configs, notes, options and names that nobody means: one message that says what is off, and no traceback."""

import json
from pathlib import Path

import pytest

BEYOND = "1" + "0" * 400  # an int in JSON and in Python, and no float
COMMANDS = {
    "inspect": ["inspect"],
    "yarn": ["patch", "-m", "yarn", "--factor", 4, "--dry-run"],
    "none": ["patch", "-m", "none", "--dry-run"],
}


@pytest.fixture
def refused(ropecli):
    """refused("inspect", folder, ...) -> the one message of a call with exit status 2."""

    def call(*arguments: object) -> str:
        outcome = ropecli(*arguments)
        assert outcome.code == 2, outcome
        assert outcome.out == ""
        assert outcome.err.startswith("error: ")
        assert outcome.err.count("error:") == 1
        assert "Traceback" not in outcome.err
        return outcome.err

    return call


def yarn(**parameters: object) -> dict:
    return {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, **parameters}}


# Configs.


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": ["x"]}, "model_type in config.json is ['x']"),
        ({"max_position_embeddings": 0.5}, "max_position_embeddings in config.json is 0.5"),
        ({"max_position_embeddings": int(BEYOND)}, "max_position_embeddings in config.json is a number beyond all use"),
        ({"head_dim": 1e308}, "head_dim in config.json is 1e+308"),
        ({"head_dim": 10, "partial_rotary_factor": 0.5}, "rotary part of a head would be 5 wide"),
        (yarn(factor="4", mscale=1, mscale_all_dim=1), "factor in config.json is '4'"),
        (yarn(mscale=1, mscale_all_dim="x"), "mscale_all_dim in config.json is 'x'"),
        (yarn(original_max_position_embeddings=0.5), "original_max_position_embeddings in config.json is 0.5"),
        ({"max_position_embeddings": 64.7}, "max_position_embeddings in config.json is 64.7"),
        ({"head_dim": 10**14}, "rotary part of a head would be 100000000000000 wide"),
        ({"partial_rotary_factor": 3.0}, "rotary part of a head would be 96 wide"),
        ({"rope_theta": 1e-300, "rope_parameters": None}, "rope_theta in config.json is 1e-300"),
    ],
    ids=[
        "type",
        "half-a-window",
        "huge-window",
        "huge-head",
        "odd-head",
        "text",
        "text-all-dim",
        "half-the-original",
        "broken-window",
        "endless-head",
        "three-heads",
        "tiny-base",
    ],
)
def test_a_value_that_no_model_has_is_refused_by_name(change, named, command, llama, edited, refused):
    folder = edited(llama, **change)
    name, *options = COMMANDS[command]
    assert named in refused(name, folder, *options)


@pytest.mark.parametrize("command", COMMANDS)
def test_json_deeper_than_any_config_is_refused(command, llama, edited, refused):
    """json reads this depth; what walks through it afterwards would not come back."""
    path = edited(llama) / "config.json"
    path.write_text('{"odd": ' + '{"a":' * 700 + "1" + "}" * 700 + "," + path.read_text()[1:])
    name, *options = COMMANDS[command]
    assert f"{path} is nested more than 64 levels deep" in refused(name, path.parent, *options)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("theta", ["x", {"a": 1}], ids=["text", "object"])
def test_an_old_base_that_is_none_is_warned_of_where_there_is_a_newer(theta, command, llama, edited, ropecli):
    name, *options = COMMANDS[command]
    outcome = ropecli(name, edited(llama, rope_theta=theta), *options)
    assert outcome.code == 0
    said = f"rope_theta is {theta} at the top and 10000.0 in rope_parameters."
    assert said in (outcome.out if name == "inspect" else outcome.err)


def test_a_config_of_sliding_layers_alone_is_shown_and_not_patched(llama, edited, ropecli, refused):
    folder = edited(llama, rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}})
    report = json.loads(ropecli("inspect", folder, "--json").out)
    assert [rope["layer_type"] for rope in report["ropes"]] == ["sliding_attention"]
    for command in ("yarn", "none"):
        name, *options = COMMANDS[command]
        assert "no layer that sees the whole context has rotary positions" in refused(name, folder, *options)


# Notes.


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ("method: linear", "method: [a]", "ropecli.yaml cannot be read (Unknown method"),
        ("params: {}", "params: {3: 4}", "linear has no parameter '3'"),
    ],
    ids=["method", "params"],
)
def test_a_note_of_a_scaling_that_there_is_not(before, after, named, llama, ropecli, refused, tmp_path):
    """It says what is in effect, which inspect shows; the way back, which patch goes, does not need it."""
    folder = tmp_path / "out"
    assert ropecli("patch", llama, "-m", "linear", "--factor", 4, "--no-verify", "-o", folder).code == 0
    note = (folder / "ropecli.yaml").read_text()
    assert before in note
    (folder / "ropecli.yaml").write_text(note.replace(before, after))
    assert named in refused("inspect", folder)
    outcome = ropecli("patch", folder, "-m", "yarn", "--factor", 2, "--dry-run", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    assert json.loads(outcome.out)["target_length"] == 128


def test_a_note_beside_a_config_that_has_become_nonsense(llama, edited, ropecli, refused, tmp_path):
    assert ropecli("patch", llama, "-m", "linear", "--factor", 4, "--no-verify", "-o", tmp_path / "out").code == 0
    folder = edited(tmp_path / "out", rope_parameters="abc")
    for name, *options in COMMANDS.values():
        assert "rope_parameters in config.json is 'abc'" in refused(name, folder, *options)


# Options.


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--target-length", BEYOND], "--target-length is beyond any use"),
        (["--factor", 4, "--original-length", BEYOND], "--original-length is beyond any use"),
        (["--factor", 4, "--set", f"beta_fast={BEYOND}"], "beta_fast is a number beyond all use"),
        (["--factor", 4, "--set", "beta_fast=" + "[" * 3000], "beta_fast is '[[["),
    ],
    ids=["target", "original", "set", "deep"],
)
def test_an_option_beyond_reason_is_refused_in_few_words(options, named, llama, refused):
    message = refused("patch", llama, "-m", "yarn", *options, "--dry-run")
    assert named in message
    assert len(message) < 200


def test_a_longrope_from_a_window_of_one_has_no_temperature(llama, refused):
    options = ["--factor", 4, "--original-length", 1, "--set", f"long_factor={[1.0] * 16}", "--dry-run"]
    assert "A pretraining window of 1 gives no attention factor" in refused("patch", llama, "-m", "longrope", *options)


# Names.


@pytest.mark.parametrize("name", ["~nosuchuser/x", "a" * 5000], ids=["home", "long"])
def test_a_name_that_no_folder_can_have(name, refused):
    message = refused("inspect", name)
    assert f"{name[:80]!r} cannot be the name of a folder" in message
    assert len(message) < 400


def test_an_output_that_no_file_system_takes(llama, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = refused("patch", llama, "-m", "yarn", "--factor", 4, "-o", "a" * 5000)
    assert "cannot be written: File name too long" in message
    assert list(Path.cwd().iterdir()) == []
