"""What an output may be: a new file or folder, or an earlier output of ours; never a file of the user's."""

import json
import shutil
from pathlib import Path

import pytest

MEASURED = ["--lengths", "32", "--max-documents", 1]
DRAWN = ["--kind", "wavelengths"]
ASKED = ["--lengths", "64", "--depths", "0.5", "--trials", 1]


@pytest.fixture
def checkpoint(llama, tmp_path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "checkpoint"))


@pytest.fixture
def text(corpus, tmp_path) -> Path:
    (tmp_path / "data").mkdir()
    return Path(shutil.copy(corpus / "text00.txt", tmp_path / "data" / "text.txt"))


def refused(outcome, *named: str) -> None:
    assert (outcome.code, outcome.out) == (2, ""), outcome
    assert outcome.err.startswith("error: ")
    for name in named:
        assert name in outcome.err


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("eval-ppl", ["--data", "data/text.txt", *MEASURED, "-o", "data/text.txt"]),
        ("eval-ppl", ["--data", "data", *MEASURED, "-o", "./data/../data/text.txt"]),
        ("eval-ppl", ["--data", "data", *MEASURED, "-o", "link.txt"]),
        ("eval-ppl", ["--data", "data", *MEASURED, "-o", "checkpoint/config.json"]),
        ("eval-ppl", ["--data", "data", *MEASURED, "-o", "checkpoint/model.safetensors"]),
        ("eval-ppl", ["--data", "data", *MEASURED, "-o", "checkpoint/tune.json"]),
        ("compare", ["--data", "data", *MEASURED, "--methods", "none", "-o", "data/text.txt"]),
        ("compare", ["--data", "data", *MEASURED, "--methods", "none", "--plot", "new.svg", "-o", "./new.svg"]),
        (
            "passkey",
            [*ASKED, "--factors-file", "factors.json", "--method", "longrope", "--factor", 2, "-o", "factors.json"],
        ),
        ("needle", ["--data", "data", *ASKED, "-o", "new.png", "--plot", "new.png"]),
        ("plot", [*DRAWN, "-o", "report.svg"]),
    ],
)
def test_no_file_of_the_user_is_overwritten(
    ropecli, checkpoint, text, tmp_path, contents, monkeypatch, command, arguments
):
    monkeypatch.chdir(tmp_path)
    (checkpoint / "tune.json").write_text(json.dumps({"kind": "tune"}))
    Path("link.txt").symlink_to(text)
    Path("factors.json").write_text(json.dumps([1.0] * 16))
    Path("report.svg").write_text(json.dumps({"kind": "perplexity"}))
    before = contents(tmp_path)
    refused(ropecli(command, "checkpoint", *arguments), "Give")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("before", ["", '[{"kind": "perplexity", "schema_version": 1, "digest": "0"}]'])
def test_an_earlier_output_is_replaced(ropecli, llama, text, tmp_path, before):
    report, plot, page = tmp_path / "report.json", tmp_path / "plot.svg", tmp_path / "page.html"
    report.write_text(before)
    for _ in range(2):
        outcome = ropecli(
            "compare", llama, "--data", text, *MEASURED, "--methods", "none", "-o", report, "--plot", plot
        )
        assert outcome.code == 0, outcome.err
        assert ropecli("report", report, "-o", page).code == 0
    assert json.loads(report.read_text())[0]["kind"] == "perplexity"


def test_the_home_folder_in_any_path(ropecli, llama, text, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(text.parent)
    (tmp_path / "factors.json").write_text(json.dumps([1.0] * 16))
    (tmp_path / "recipe.yaml").write_text("data: demo-train\nlength: 64\n")
    for command in (
        [
            "compare",
            llama,
            "--data=~/data",
            *MEASURED,
            "--methods",
            "none",
            "--output=~/report.json",
            "--plot=~/plot.svg",
        ],
        ["plot", "~/report.json", "--output=~/plot.png"],
        ["report", "~/report.json", "--output=~/page.html"],
        ["patch", llama, "--method", "longrope", "--factor", 2, "--factors-file=~/factors.json", "--output=~/patched"],
        ["plan", "~/patched", "--recipe=~/recipe.yaml"],
    ):
        outcome = ropecli(*command)
        assert outcome.code == 0, outcome.err
    refused(ropecli("merge", "~/data", "--output=~/whole"), str(text.parent))
    made = {"factors.json", "recipe.yaml", "data", "report.json", "plot.svg", "plot.png", "page.html", "patched"}
    assert made <= names(tmp_path)
    assert names(text.parent) == {"text.txt"}
