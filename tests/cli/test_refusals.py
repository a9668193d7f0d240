"""Bad input, one row each: what is prepared, the command, and the part of the one message that matters.

A row's `prepare` writes files below the current folder, which has the checkpoint `source` (a copy of the tiny Llama). It
may return the path that the command needs. Every command ends with exit status 2, one message, and no traceback.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

import ropecli


class Refusal(NamedTuple):
    name: str
    command: Sequence[object]
    message: str
    prepare: Callable[[Path], object] = lambda folder: None


def write(name: str, text: str | bytes) -> Callable[[Path], object]:
    """A `prepare` that writes one file."""

    def prepare(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))

    return prepare


RULER: list[Refusal] = []


def patched(name: str, text: str | bytes) -> Callable[[Path], object]:
    """A `prepare` that patches `source` to `patched` and adds a file to it."""

    def prepare(folder: Path) -> None:
        ropecli.patch(folder / "source", method="yarn", factor=2, output=folder / "patched", no_verify=True)
        write(f"patched/{name}", text)(folder)

    return prepare


def added(name: str, text: str) -> Callable[[Path], object]:
    """A `prepare` that patches `source` to `patched` and appends to a file of it."""

    def prepare(folder: Path) -> None:
        patched("LICENSE", "none")(folder)
        with (folder / "patched" / name).open("a") as file:
            file.write(text)

    return prepare


def move_source(folder: Path) -> None:
    (folder / "source").rename(folder / "my folder")


def make_adapter(folder: Path) -> None:
    move_source(folder)
    (folder / "my folder" / "adapter_config.json").write_text("{}")
    (folder / "my folder" / "model.safetensors").unlink()


LEVELS = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))
MERGED = "".join(f"a{i}: &a{i}\n" + f"  <<: *a{i - 1}\n" for i in range(1, 9))
LONG = "v" * 5000
FINETUNE = ("finetune", "source", "--output", "out", "--recipe", "recipe.yaml")
PUSH = ("push", "patched", "--repo", "me/tiny", "--dry-run")
MEASURE = ("eval-ppl", "source", "--data", "demo", "--lengths", 32, "--max-documents", 1)

OUTPUTS: list[Refusal] = [
    Refusal(
        "merge keys in a recipe",
        FINETUNE,
        "merge keys (<<) are not supported",
        write("recipe.yaml", f"a0: &a0 {{x: 1}}\n{MERGED}"),
    ),
    Refusal(
        "aliases of lists in a recipe",
        FINETUNE,
        "it has too many values",
        write("recipe.yaml", f"a0: &a0 [x]\n{LEVELS}"),
    ),
    Refusal(
        "many keys in a recipe, one of them twice",
        FINETUNE,
        "key 'k19999' is given twice",
        write("recipe.yaml", "".join(f"k{i}: 1\n" for i in range(20_000)) + "k19999: 2\n"),
    ),
    Refusal(
        "many unknown keys in a recipe",
        FINETUNE,
        "  k1: Extra inputs are not permitted",
        write("recipe.yaml", "data: demo-train\n" + "".join(f"k{i}: 1\n" for i in range(200))),
    ),
    Refusal(
        "merge keys in the metadata of README.md",
        PUSH,
        "README.md cannot become the model card: merge keys (<<) are not supported",
        patched("README.md", "---\na: &a {x: 1}\nb: {<<: *a}\n---\n"),
    ),
    Refusal("a README.md of 3 MiB", PUSH, "it is larger than 2048 KiB", patched("README.md", "x" * 3 * 2**20)),
    Refusal("a README.md that is not UTF-8", PUSH, "'utf-8' codec can't decode", patched("README.md", b"# Caf\xe9")),
    Refusal(
        "changes of other layer types in ropecli.yaml",
        PUSH,
        "its changes are of other layer types",
        added("ropecli.yaml", "changes: [{path: rope_parameters.rope_type, before: {}, after: yarn}]\n"),
    ),
    Refusal(
        "a pattern without a file",
        (*PUSH, "--include", "absent.*"),
        "--include is 'absent.*', but patched has no such file",
        patched("LICENSE", "none"),
    ),
    Refusal(
        "a card that is the user's own text",
        PUSH,
        "patched.README.md exists and is not a model card of ropecli",
        lambda folder: (patched("LICENSE", "none")(folder), (folder / "patched.README.md").write_text("notes")),
    ),
    Refusal(
        "a card that is a link",
        PUSH,
        "patched.README.md exists and is not a model card of ropecli",
        lambda folder: (
            patched("LICENSE", "none")(folder),
            (folder / "patched.README.md").symlink_to(folder / "notes.md"),
        ),
    ),
    Refusal(
        "a folder's name in a command, for hf",
        ("push", "my folder", "--repo", "me/tiny"),
        "Upload it with: hf upload me/tiny 'my folder'",
        move_source,
    ),
    Refusal(
        "a folder's name in a command, for ropecli",
        ("inspect", "my folder"),
        "ropecli merge 'my folder' --output DIR",
        make_adapter,
    ),
    Refusal("a long name of a method", ("patch", "source", "--method", LONG, "--factor", 2), "Unknown method 'vvv"),
    Refusal(
        "a long name of a key",
        ("patch", "source", "--method", "yarn", "--factor", 2, "--dry-run", "--set", f"{LONG}=1"),
        "vvv...",
    ),
    Refusal("a long name of a config file", ("export", "source", "-e", "trl", "-o", LONG), "File name too long"),
    Refusal("a long name of an earlier report", ("plot", LONG), "File name too long"),
    Refusal("a long name of a recipe", ("finetune", "source", "-o", "out", "--recipe", LONG), "File name too long"),
    Refusal(
        "key tokens where nothing can be written",
        (*MEASURE, "--protocol", "longppl", "--evaluator", "source", "--keys", "text/keys.json"),
        "text is not a writable folder",
        write("text", "x"),
    ),
    Refusal(
        "a report inside of another output",
        ("compare", "source", "--data", "demo", "--methods", "none", "-o", "out", "--plot", "out/plot.png"),
        "out and out/plot.png cannot both be written",
    ),
]

TRAINING: list[Refusal] = []

OTHERS: list[Refusal] = []


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.name) for row in (*RULER, *OUTPUTS, *TRAINING, *OTHERS)] or [None]
)
def test_bad_input_is_refused(row, ropecli, source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row.prepare(tmp_path)
    outcome = ropecli(*row.command)
    assert outcome.code == 2, outcome
    assert outcome.err.count("error:") == 1, outcome.err
    assert "Traceback" not in outcome.err
    assert row.message in outcome.err
    assert len(outcome.err) < 1500
