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


def test_the_home_folder_in_any_path(ropecli, llama, text, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(text.parent)
    (tmp_path / "factors.json").write_text(json.dumps([1.0] * 16))
    (tmp_path / "recipe.yaml").write_text("data: demo-train\nlength: 64\n")
    for command in (
        ["compare", llama, "--data=~/data", *MEASURED, "-m", "none", "--output=~/report.json", "--plot=~/plot.svg"],
        ["plot", "~/report.json", "--output=~/plot.png"],
        ["report", "~/report.json", "--output=~/page.html"],
        ["patch", llama, "-m", "longrope", "--factor", 2, "--factors-file=~/factors.json", "--output=~/patched"],
        ["plan", "~/patched", "--recipe=~/recipe.yaml"],
    ):
        outcome = ropecli(*command)
        assert outcome.code == 0, outcome.err
    refused(ropecli("merge", "~/data", "--output=~/whole"), str(text.parent))
    made = {"factors.json", "recipe.yaml", "data", "report.json", "plot.svg", "plot.png", "page.html", "patched"}
    assert made <= names(tmp_path)
    assert names(text.parent) == {"text.txt"}
