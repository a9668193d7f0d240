"""Folders that mean harm: links out of them, pipes, bombs and code. Refused in one message, or handled without
leaving the folder and without running anything; never waited for."""

import json
import os
import pickle
import shutil
import signal
import socket
import tempfile
from pathlib import Path

import pytest

PATCH = ["patch", "-m", "yarn", "--factor", 4, "--no-verify", "-o", "out"]
REVERT = ["patch", "--revert", "-o", "out"]
INDEX = "model.safetensors.index.json"
READ = ["config.json", "tokenizer_config.json", "ropecli.yaml", INDEX]
COPIED = ["tokenizer.json", "generation_config.json", "README.md", "merges.txt", "LICENSE", "spiece.model"]


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

    def call(folder: Path, command: str, *options: object) -> str:
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
    outcome = ropecli("patch", source, *PATCH[1:-1], tmp_path / "patched")
    assert outcome.code == 0
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


@pytest.mark.parametrize("relative", [False, True], ids=["absolute", "relative"])
@pytest.mark.parametrize("name", [*READ, *COPIED])
def test_a_small_file_that_is_a_link_out_of_the_folder(name, relative, source, secret, refused):
    replace(source / name).symlink_to(os.path.relpath(secret, source) if relative else secret)
    message = refused(source, *PATCH)
    assert f"{source / name} is a link out of its folder, to {secret}" in message
    assert "hunter2" not in message


@pytest.mark.parametrize("name", ["config.json", "ropecli.yaml"])
@pytest.mark.parametrize("command", [["inspect"], [*PATCH[:-2], "--dry-run"], REVERT], ids=["inspect", "dry", "revert"])
def test_no_command_reads_through_such_a_link(command, name, patched, secret, refused):
    replace(patched / name).symlink_to(secret)
    assert "is a link out of its folder" in refused(patched, *command)


@pytest.mark.parametrize("command", [["eval-ppl", "-d", "demo"], ["compare", "-d", "demo"], ["finetune", "-d", "demo"]])
def test_what_loads_the_model_refuses_it_before(command, source, secret, refused):
    replace(source / "tokenizer.json").symlink_to(secret)
    name, *options = command
    options += ["-o", "run"] if name == "finetune" else []
    assert "is a link out of its folder" in refused(source, name, *options)


def test_code_that_is_a_link_out_of_the_folder(source, secret, refused):
    (source / "modeling_own.py").symlink_to(secret)
    rewrite(source / "config.json", auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    assert "modeling_own.py is a link out of its folder" in refused(source, *PATCH)


def test_a_folder_that_only_looks_like_the_hubs_cache(source, secret, refused, tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "c"
    snapshot.parent.mkdir(parents=True)
    source.rename(snapshot)
    replace(snapshot / "README.md").symlink_to(os.path.relpath(secret, snapshot))
    assert "is a link out of its folder" in refused(snapshot, *PATCH)


@pytest.mark.parametrize("through", [False, True], ids=["folder", "link-to-folder"])
def test_a_link_inside_the_folder_is_followed(through, source, ropecli, tmp_path):
    (source / "real.md").write_text("card")
    (source / "README.md").symlink_to("real.md")
    if through:
        (tmp_path / "link").symlink_to(source)
    outcome = ropecli("patch", tmp_path / "link" if through else source, *PATCH[1:-1], tmp_path / "out")
    assert outcome.code == 0, outcome.err
    assert (tmp_path / "out" / "README.md").read_text() == "card"
    assert not (tmp_path / "out" / "README.md").is_symlink()


@pytest.mark.parametrize("target", ["/etc/passwd", "secret"])
def test_weights_that_lead_to_what_are_no_weights(target, source, secret, refused):
    replace(source / "model.safetensors").symlink_to(secret if target == "secret" else target)
    assert "model.safetensors is damaged or no safetensors file" in refused(source, *PATCH)


@pytest.mark.parametrize("name", [*READ, "tokenizer.json", "model.safetensors"])
def test_links_that_loop(name, source, refused):
    replace(source / name).symlink_to("other")
    (source / "other").symlink_to(name)
    message = refused(source, *PATCH)
    assert str(source / name) in message
    assert "Too many levels of symbolic links" in message


def test_a_folder_that_is_a_link_to_itself(refused, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    assert "No folder" in refused(tmp_path / "loop", *PATCH)


def test_folders_that_loop_are_not_walked(source, ropecli, tmp_path):
    (source / "again").symlink_to(source)
    assert ropecli("patch", source, *PATCH[1:-1], tmp_path / "out").code == 0
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


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "folder"])
@pytest.mark.parametrize("name", [*READ, "tokenizer.json", "model.safetensors", "extra.safetensors"])
def test_what_is_no_file(name, kind, source, refused, ropecli, tmp_path):
    make(replace(source / name), kind)
    if (name, kind) == ("tokenizer.json", "folder"):  # no name that is read; folders are none of a checkpoint's files
        assert ropecli("patch", source, *PATCH[1:-1], tmp_path / "out").code == 0
        return
    assert f"{source / name} is a" in refused(source, *PATCH)
    if name in ("config.json", "tokenizer_config.json", "ropecli.yaml"):
        assert f"{source / name} is a" in refused(source, "inspect")


# Weights and their index.


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../private/secret.json", "sub/model.safetensors", ".", "", "x" * 9999]
)
def test_an_index_that_leads_elsewhere(path, source, secret, refused):
    (source / "sub").mkdir()
    shutil.copyfile(source / "model.safetensors", source / "sub" / "model.safetensors")
    (source / INDEX).write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": path}}))
    assert f"{INDEX} names {path[:100]}, which is not in {source}" in refused(source, *PATCH)


@pytest.mark.parametrize(
    "weights",
    [
        (100 * 2**30).to_bytes(8, "little") + b"{}",
        (2**64 - 1).to_bytes(8, "little") + b"{}",
        (40).to_bytes(8, "little") + b'{"a":',
        b"\x02" + bytes(7) + b"[]",
        b"",
    ],
    ids=["100-GB", "all-ones", "cut", "list", "empty"],
)
def test_a_header_that_lies(weights, source, refused):
    replace(source / "model.safetensors").write_bytes(weights)
    assert "model.safetensors is damaged or no safetensors file" in refused(source, *PATCH)


def test_a_tensor_that_claims_more_than_the_file(source, refused):
    header = json.dumps({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    replace(source / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert "model.safetensors is damaged or no safetensors file" in refused(source, *PATCH)


# Sizes and depths.


@pytest.mark.parametrize("name", READ)
def test_a_hundred_megabytes(name, patched, refused):
    with (patched / name).open("ab") as file:
        file.truncate(100 * 2**20)
    message = refused(patched, *PATCH)
    assert f"{patched / name} cannot be read" in message
    assert "it holds more than" in message


@pytest.mark.parametrize("depth", [70, 900, 100_000])
@pytest.mark.parametrize("name", READ)
def test_nesting_without_end(name, depth, patched, refused):
    opened, closed = ('{"a":', "}") if name != "ropecli.yaml" else ("{a: ", "}")
    (patched / name).write_text(opened * depth + "1" + closed * depth)
    assert f"{patched / name} " in refused(patched, *PATCH)


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
)
MERGES = "m0: &m0 {a: 1, b: 2}\n" + "".join(
    f"m{i}: &m{i}\n  <<: [{', '.join([f'*m{i - 1}'] * 10)}]\n" for i in range(1, 10)
)


@pytest.mark.parametrize(
    ("bomb", "named"),
    [
        (LAUGHS, "more than 20000 values"),
        (LAUGHS + "changes: [{path: *a11, before: 1, after: 2}]\n", "more than 20000 values"),
        (MERGES, "merge keys"),
        ("a: &a [*a]\n", "nested more than 64 levels deep"),
        ("a: " + "1:" * 100_000 + "1\n", "a value is longer than 10000 characters"),
        ("target_length: 0x" + "f" * 5000 + "\n", "a number beyond all use"),
        ("target_length: " + "9" * 5000 + "\n", "Exceeds the limit"),
        ("target_length: " + "9" * 300 + "\n", "a number beyond all use"),
        ("a: " + "x" * 20_000 + "\n", "a value is longer than 10000 characters"),
        ("- 1\n" * 30_000, "more than 20000 values"),
        ("a: !!python/object/apply:os.system ['touch canary']\n", "could not determine a constructor"),
        ("a: !!python/name:os.system\n", "could not determine a constructor"),
        ("\x00", "unacceptable character"),
    ],
    ids=["laughs", "told", "merges", "self", "sixties", "hex", "digits", "300", "long", "many", "apply", "name", "nul"],
)
@pytest.mark.parametrize("command", [["inspect"], PATCH, REVERT], ids=["inspect", "patch", "revert"])
def test_a_note_that_is_a_bomb(command, bomb, named, patched, refused, tmp_path):
    (patched / "ropecli.yaml").write_text(bomb)
    message = refused(patched, *command)
    assert f"{patched / 'ropecli.yaml'} cannot be read" in message
    assert named in message
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("key", ["original_max_position_embeddings", "target_length"])
@pytest.mark.parametrize("number", [10**18, 10**40, -1, 0, "1e400", ".nan"])
def test_numbers_of_a_note_that_no_window_has(number, key, patched, ropecli, tmp_path):
    note = (patched / "ropecli.yaml").read_text().splitlines()
    lines = [f"{key}: {number}" if line.startswith(f"{key}:") else line for line in note]
    (patched / "ropecli.yaml").write_text("\n".join(lines))
    for command, *options in (["inspect"], [*PATCH[:-2], "--dry-run"], [*REVERT[:-2], "--dry-run"]):
        outcome = ropecli(command, patched, *options)
        assert outcome.code in (0, 2)
        assert "Traceback" not in outcome.err


# Code and pickles.


class Canary:
    """What unpickling it would do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside"])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.pth", "adapter_model.bin"])
def test_pickled_weights_are_not_opened(name, beside, source, refused, ropecli, tmp_path, corpus):
    canary = tmp_path / "canary"
    (source / name).write_bytes(pickle.dumps(Canary(canary)))
    if beside:
        assert ropecli("patch", source, *PATCH[1:5], "-o", tmp_path / "out").code == 0
        assert not (tmp_path / "out" / name).exists()
    else:
        (source / "model.safetensors").unlink()
        assert f"{name} is pickled and is not read" in refused(source, *PATCH)
        assert "is pickled" in refused(source, "eval-ppl", "-d", corpus, "-l", 64)
    assert not canary.exists()


@pytest.mark.parametrize("known", [True, False], ids=["llama", "unknown"])
@pytest.mark.parametrize(
    "command",
    [
        ["inspect"],
        ["patch", "-m", "yarn", "--factor", 4, "-o", "out"],
        ["eval-ppl", "-l", "64", "--max-documents", 1, "-d"],
    ],
    ids=["inspect", "patch", "eval-ppl"],
)
def test_code_is_not_run(command, known, source, ropecli, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    canary = tmp_path / "canary"
    for name in ("configuration_own", "modeling_own", "tokenization_own", "__init__"):
        (source / f"{name}.py").write_text(f"open({str(canary)!r}, 'w')\n")
    maps = {"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}
    rewrite(source / "config.json", auto_map=maps, **({} if known else {"model_type": "own"}))
    rewrite(source / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_own.Own", None]})
    name, *options = command
    outcome = ropecli(name, source, *options, *([corpus] if name == "eval-ppl" else []))
    assert outcome.code in (0, 2)
    assert "Traceback" not in outcome.err
    assert not canary.exists()
    if known and name != "eval-ppl":
        assert outcome.code == 0, outcome.err


def test_a_patch_is_taken_back_without_running_code(source, ropecli, tmp_path):
    canary = tmp_path / "canary"
    (source / "modeling_own.py").write_text(f"open({str(canary)!r}, 'w')\n")
    rewrite(source / "config.json", auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    assert ropecli("patch", source, *PATCH[1:5], "-o", tmp_path / "patched").code == 0
    assert ropecli("patch", tmp_path / "patched", "--revert", "-o", tmp_path / "back").code == 0
    assert (tmp_path / "back" / "modeling_own.py").is_file()
    assert not canary.exists()


@pytest.mark.parametrize("command", [["patch", "-m", "none", "-o", "out"], ["eval-ppl", "-d", "demo"]], ids=str)
@pytest.mark.parametrize(
    "config",
    [
        {"attn_implementation": "owner/kernel"},
        {"_attn_implementation": "paged|owner/kernel@main:run"},
        {"_attn_implementation_internal": "owner/kernel"},
        {"attn_implementation": {"": "owner/kernel"}},
        {"text_config": {"_attn_implementation": "owner/kernel"}},
    ],
    ids=str,
)
def test_attention_code_from_the_hub_is_not_asked_for(config, command, source, refused):
    rewrite(source / "config.json", **config)
    name, *options = command
    assert "asks for attention code from the Hub" in refused(source, name, *options)


# Permissions.


@pytest.mark.parametrize("name", ["", *READ, "tokenizer.json", "model.safetensors"])
def test_what_may_not_be_read(name, llama, ropecli):
    """As an ordinary user; the superuser may read everything."""
    with tempfile.TemporaryDirectory() as home:
        source = Path(shutil.copytree(llama, Path(home) / "source"))
        (source / "ropecli.yaml").write_text("finetuned: {}\n")
        (source / INDEX).write_text('{"weight_map": {"a": "model.safetensors"}}')
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
            (source / name).chmod(0o700)
        assert outcome.code == 2, outcome
        assert "Permission denied" in outcome.err
        assert str(source / name) in outcome.err
        assert left == ["first", "source"]
