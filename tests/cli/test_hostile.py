"""Folders and values that mean harm or make no sense: refused in one message, or handled without leaving the folder
and without running anything; never waited for, and never a traceback."""

import json
import os
import pickle
import shutil
import signal
import socket
import tempfile
from pathlib import Path

import pytest

from ropecli.checkpoint.inspection import inspect_checkpoint
from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.patch_plan import make_plan
from ropecli.checkpoint.state import read_state
from ropecli.errors import RopecliError
from ropecli.scaling.spec import make_spec

PATCH = ["patch", "--method", "yarn", "--factor", 4, "--no-verify", "-o", "out"]
REVERT = ["patch", "--revert", "-o", "out"]
INDEX = "model.safetensors.index.json"


@pytest.fixture(autouse=True)
def never_waits():
    """A pipe that is opened waits for ever; the alarm ends that."""

    def stop(*arguments: object) -> None:
        raise TimeoutError("still waiting")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def refused(ropecli, tmp_path, contents, monkeypatch):
    """refused(folder, command, ...) -> the one message of a call with exit status 2 that changed nothing on disk."""
    monkeypatch.chdir(tmp_path)

    def call(folder: object, command: str, *options: object) -> str:
        before = contents(tmp_path)
        outcome = ropecli(command, folder, *options)
        assert (outcome.code, outcome.out) == (2, ""), outcome
        assert outcome.err.count("error:") == 1
        assert "Traceback" not in outcome.err
        assert len(outcome.err) < 1000
        assert contents(tmp_path) == before
        return outcome.err

    return call


@pytest.fixture
def patched(ropecli, source, tmp_path) -> Path:
    """A patched copy, for what is done to ropecli.yaml."""
    assert ropecli("patch", source, *PATCH[1:-1], tmp_path / "patched").code == 0
    return tmp_path / "patched"


@pytest.fixture
def secret(tmp_path, llama) -> Path:
    """A private file outside the folder, which would do as config.json, too."""
    path = tmp_path / "private" / "secret.json"
    path.parent.mkdir()
    path.write_text(json.dumps({**json.loads((llama / "config.json").read_text()), "password": "hunter2"}))
    return path


def replace(path: Path) -> Path:
    path.unlink(missing_ok=True)
    return path


def rewrite(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


# Links.


@pytest.mark.parametrize("name", ["config.json", INDEX, "tokenizer.json"])
def test_a_small_file_that_is_a_link_out_of_the_folder(name, source, secret, refused):
    replace(source / name).symlink_to(os.path.relpath(secret, source) if name == "tokenizer.json" else secret)
    message = refused(source, *PATCH)
    assert f"{source / name} is a link out of its folder, to {secret}" in message
    assert "hunter2" not in message


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("config.json", ["inspect"]),
        ("ropecli.yaml", REVERT),
        ("tokenizer.json", ["eval-ppl", "-d", "demo"]),
        ("tokenizer.json", ["finetune", "-d", "demo", "-o", "run"]),
    ],
    ids=["inspect", "revert", "eval-ppl", "finetune"],
)
def test_no_command_reads_through_such_a_link(command, name, patched, secret, refused):
    replace(patched / name).symlink_to(secret)
    assert "is a link out of its folder" in refused(patched, *command)


def test_code_that_is_a_link_out_of_the_folder(source, secret, refused):
    (source / "modeling_own.py").symlink_to(secret)
    rewrite(source / "config.json", auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    assert "modeling_own.py is a link out of its folder" in refused(source, *PATCH)


def test_links_inside_the_folder_are_followed_and_folders_that_loop_are_not_walked(source, ropecli, tmp_path):
    (source / "real.md").write_text("card")
    (source / "README.md").symlink_to("real.md")
    (source / "again").symlink_to(source)
    (tmp_path / "link").symlink_to(source)
    assert ropecli("patch", tmp_path / "link", *PATCH[1:-1], tmp_path / "out").code == 0
    assert (tmp_path / "out" / "README.md").read_text().endswith("-->\ncard")
    assert not (tmp_path / "out" / "README.md").is_symlink()
    assert not (tmp_path / "out" / "again").exists()


# What is no file.


def make(path: Path, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
        Path(path.name).rename(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()


@pytest.mark.parametrize(
    ("name", "kind"),
    [("config.json", "pipe"), ("ropecli.yaml", "socket"), ("config.json", "device"), ("extra.safetensors", "folder")],
)
def test_what_is_no_file(name, kind, source, refused):
    make(replace(source / name), kind)
    assert f"{source / name} is a" in refused(source, *PATCH)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_what_may_not_be_read(name, llama, ropecli):
    """As an ordinary user; the superuser may read everything."""
    with tempfile.TemporaryDirectory() as home:
        source = Path(shutil.copytree(llama, Path(home) / "source"))
        source.chmod(0o755)
        for path in source.iterdir():
            path.chmod(0o644)
        assert ropecli("patch", source, *PATCH[1:-1], Path(home) / "first").code == 0  # loads what a user could not
        Path(home).chmod(0o777)
        (source / name).chmod(0)
        if superuser := os.geteuid() == 0:
            os.seteuid(65534)
        try:
            outcome = ropecli("patch", source, *PATCH[1:-1], Path(home) / "out")
            left = sorted(path.name for path in Path(home).iterdir())
        finally:
            if superuser:
                os.seteuid(0)
        assert outcome.code == 2, outcome
        assert "Permission denied" in outcome.err
        assert str(source / name) in outcome.err
        assert left == ["first", "source"]


# Weights and their index.


@pytest.mark.parametrize("path", ["/etc/passwd", "../private/secret.json"])
def test_an_index_that_leads_elsewhere(path, source, secret, refused):
    (source / "sub").mkdir()
    shutil.copyfile(source / "model.safetensors", source / "sub" / "model.safetensors")
    (source / INDEX).write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": path}}))
    assert f"{INDEX} lists {path}, which is not in {source}" in refused(source, *PATCH)


WEIGHTS = {
    "another file": b'{"password": "hunter2"}',
    "100 GB": (100 * 2**30).to_bytes(8, "little") + b"{}",
    "a tensor beyond the end": (66).to_bytes(8, "little")
    + b'{"a": {"dtype": "F32", "shape": [1024], "data_offsets": [0, 4096]}}',
}


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_weights_that_are_none(weights, source, secret, refused):
    secret.write_bytes(weights)
    replace(source / "model.safetensors").symlink_to(secret)  # weights may lie elsewhere
    assert "model.safetensors is damaged or not a safetensors file" in refused(source, *PATCH)


# Sizes and depths.


@pytest.mark.parametrize("name", ["config.json", "ropecli.yaml"])
def test_a_hundred_megabytes(name, patched, refused):
    with (patched / name).open("ab") as file:
        file.truncate(100 * 2**20)
    message = refused(patched, *PATCH)
    assert f"{patched / name} cannot be read" in message
    assert "it is larger than" in message


@pytest.mark.parametrize(("name", "depth"), [("config.json", 100_000), ("ropecli.yaml", 70)])
def test_nesting_without_end(name, depth, patched, refused):
    opened, closed = ('{"a":', "}") if name == "config.json" else ("{a: ", "}")
    (patched / name).write_text(opened * depth + "1" + closed * depth)
    assert f"{patched / name} " in refused(patched, *PATCH)


def repeated(first: str, line: str, between: str) -> str:
    """Lines of which each names the one before ten times."""
    return first + "".join(line.format(i=i, names=between.join([f"*a{i - 1}"] * 10)) for i in range(1, 12))


NOTES = {
    "aliases": (repeated("a0: &a0 [x]\n", "a{i}: &a{i} [{names}]\n", ", "), "it has too many values"),
    "itself": ("a: &a [*a]\n", "nested more than 64 levels deep"),
    "a call": ("a: !!python/object/apply:os.system ['touch canary']\n", "could not determine a constructor"),
    "no mapping": ("- 1\n", "it is not a mapping"),
    "no number": ("changes: []\nscaling: {method: yarn, factor: x, params: {}}\n", "could not convert string to float"),
    "half a note": ("changes: []\n", "'scaling'"),
}


@pytest.mark.parametrize(("note", "named"), NOTES.values(), ids=NOTES)
def test_a_note_that_is_none(note, named, patched, refused, tmp_path):
    (patched / "ropecli.yaml").write_text(note)
    message = refused(patched, *PATCH)
    assert f"{patched / 'ropecli.yaml'} cannot be read" in message
    assert named in message
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ("params: {}", "params: {3: 4}", "linear has no parameter '3'"),
        ("factor: 4.0", "factor: .nan", "The factor is nan"),
        ("target_length: 256", "target_length: 0", "lengths of 64 and 0 tokens"),
    ],
    ids=["params", "nan", "length"],
)
def test_a_note_of_a_scaling_that_there_is_not(before, after, named, llama, ropecli, refused, tmp_path):
    folder = tmp_path / "out"
    assert ropecli("patch", llama, "--method", "linear", "--factor", 4, "--no-verify", "-o", folder).code == 0
    note = (folder / "ropecli.yaml").read_text()
    assert before in note
    (folder / "ropecli.yaml").write_text(note.replace(before, after, 1))
    message = refused(folder, "inspect")
    assert "ropecli.yaml cannot be read" in message
    assert named in message


# Code and pickles.


class Canary:
    """What unpickling it would do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (open, (str(self.path), "w"))


def test_pickled_weights_are_not_opened(source, refused, ropecli, tmp_path, corpus):
    canary, name = tmp_path / "canary", "pytorch_model.bin"
    (source / name).write_bytes(pickle.dumps(Canary(canary)))
    assert ropecli("patch", source, *PATCH[1:5], "-o", tmp_path / "beside").code == 0
    assert not (tmp_path / "beside" / name).exists()
    (source / "model.safetensors").unlink()
    assert f"{name} is a pickle, which is not supported" in refused(source, *PATCH)
    assert "is a pickle" in refused(source, "eval-ppl", "-d", corpus, "-l", 64)
    assert not canary.exists()


@pytest.mark.parametrize("known", [True, False], ids=["llama", "unknown"])
def test_code_is_not_run(known, source, ropecli, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    canary = tmp_path / "canary"
    for name in ("configuration_own", "modeling_own", "tokenization_own", "__init__"):
        (source / f"{name}.py").write_text(f"open({str(canary)!r}, 'w')\n")
    maps = {"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}
    rewrite(source / "config.json", auto_map=maps, **({} if known else {"model_type": "own"}))
    rewrite(source / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_own.Own", None]})
    outcomes = [
        ropecli("inspect", source),
        ropecli("patch", source, "--method", "yarn", "--factor", 4, "-o", "out"),
        ropecli("eval-ppl", source, "-l", "64", "--max-documents", 1, "-d", corpus),
    ]
    assert all(outcome.code in (0, 2) and "Traceback" not in outcome.err for outcome in outcomes)
    if known:
        assert [outcome.code for outcome in outcomes[:2]] == [0, 0]
        assert ropecli("patch", "out", "--revert", "-o", "back").code == 0
        assert (tmp_path / "back" / "modeling_own.py").is_file()
    assert not canary.exists()


@pytest.mark.parametrize(
    "config",
    [{"_attn_implementation": "paged|owner/kernel@main:run"}, {"text_config": {"attn_implementation": "owner/kernel"}}],
    ids=str,
)
def test_attention_code_from_the_hub_is_not_asked_for(config, source, refused):
    rewrite(source / "config.json", **config)
    assert "requests attention code from the Hub" in refused(source, "eval-ppl", "-d", "demo")


# Values.


VALUES = [
    None,
    True,
    -1,
    0.5,
    10**400,
    float("nan"),
    "4",
    "\ud800",
    "a" * 5000,
    [],
    [None],
    {},
    {"a": 1},
    {"0": {"a": "x"}},
]
SIZES = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 256, "head_dim": 32, "rope_theta": 1e4}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
NEST = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": YARN}
CONFIGS = {
    "both dialects": {**SIZES, "model_type": "mixtral", "rope_parameters": YARN, "rope_scaling": YARN},
    "nested": {**SIZES, **LAYERS, "model_type": "gemma3_text", "rope_parameters": NEST},
}
OTHER_FIELDS = ["original_max_position_embeddings", "partial_rotary_factor", "qk_rope_head_dim", "sliding_window"]
OTHER_FIELDS += ["layer_types", "per_layer_config", "text_config", "rope_local_base_freq", "layer_rope_theta"]
PARAMETERS = [*YARN, "beta_fast", "truncate", "attention_factor", "mscale_all_dim", "long_factor", "betafast"]


@pytest.mark.parametrize("name", CONFIGS)
def test_values_of_every_kind_in_every_field_that_is_read(name, tmp_path):
    """A report and a plan, or a RopecliError of few words; nothing else is raised."""
    config = CONFIGS[name]
    nest = "rope_parameters" if name == "nested" else "rope_scaling"
    changed = [{**config, field: value} for field in [*config, *OTHER_FIELDS] for value in VALUES]
    for key in PARAMETERS:
        for value in VALUES:
            inside = {**NEST, "full_attention": {**YARN, key: value}}
            changed.append({**config, nest: inside if name == "nested" else {**config[nest], key: value}})
    for one in changed:
        checkpoint = Checkpoint("hostile", tmp_path, json.loads(json.dumps(one)))
        for attempt in (
            lambda it: inspect_checkpoint(read_state(it)),
            lambda it: make_plan(it, make_spec("yarn", 4.0)),
        ):
            message = ""
            try:
                attempt(checkpoint)
            except RopecliError as error:
                message = str(error)
            assert len(message) < 600, one


@pytest.mark.parametrize("value", ["ünï\x1b[31m\n", ["\x1b[31m"], {"\x1b[31m": 1}], ids=["text", "list", "key"])
@pytest.mark.parametrize("field", ["model_type", "rope_scaling"])
def test_what_a_terminal_would_obey_is_not_sent(value, field, ropecli, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS["both dialects"], field: value}))
    for command in (["inspect"], ["patch", "--method", "yarn", "--factor", 4, "--dry-run"]):
        outcome = ropecli(command[0], tmp_path, *command[1:])
        assert outcome.code in (0, 2)
        assert "\x1b" not in outcome.out + outcome.err


# Options and names.
