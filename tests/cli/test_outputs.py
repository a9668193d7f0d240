"""What an output may be: a new file or folder, or, with --overwrite, an existing file."""

import json
import shutil
from pathlib import Path

import pytest

MEASURED = ["--lengths", "32", "--max-documents", 1]


@pytest.fixture
def checkpoint(llama, tmp_path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "checkpoint"))


@pytest.fixture
def text(corpus, tmp_path) -> Path:
    (tmp_path / "data").mkdir()
    return Path(shutil.copy(corpus / "text00.txt", tmp_path / "data" / "text.txt"))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


EVAL = "eval-ppl checkpoint --lengths 32 --max-documents 1 --data data "
COMPARE = "compare checkpoint --lengths 32 --max-documents 1 --methods none --data data "


@pytest.mark.parametrize(
    "command",
    [
        EVAL + "-o data/text.txt",
        EVAL + "-o link.txt",
        "theory checkpoint --methods yarn --factor 4 --plot plot.svg",
        "export checkpoint --engine trl --output data/text.txt",
    ],
)
def test_no_file_of_the_user_is_overwritten(ropecli, checkpoint, text, tmp_path, contents, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    Path("link.txt").symlink_to(text)
    Path("plot.svg").write_text("<svg/>")
    before = contents(tmp_path)
    ropecli(*command.split()).is_refused("exists. Choose another name, or replace it with --overwrite.")
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("command", "replaced"),
    [
        (EVAL, ["report.json"]),
        (COMPARE + "--plot plot.svg ", ["report.json", "plot.svg"]),
    ],
)
def test_a_finished_measurement_is_replaced_with_overwrite_alone(
    ropecli, checkpoint, text, tmp_path, contents, monkeypatch, command, replaced
):
    """--resume has nothing to resume. Without a report, the plot is all that is left of the hours that it took."""
    monkeypatch.chdir(tmp_path)
    measure = [*command.split(), "-o", "report.json"]
    ropecli(*measure).succeeds()
    before = contents(tmp_path)
    for path in replaced:
        with monkeypatch.context() as patch:
            patch.setattr("ropecli.checkpoint.opening.open_checkpoint", lambda *_, **__: pytest.fail("was opened"))
            for resume in ([], ["--resume"]):
                ropecli(*measure, *resume).is_refused(f"{path} exists", "replace it with --overwrite")
        assert contents(tmp_path) == before
        ropecli(*measure, "--overwrite").succeeds()
        written = {"report.json": 0, **({"plot.svg": 0} if "plot.svg" in replaced else {})}
        assert contents(tmp_path) | written == before | written
        assert Path("report.json").read_bytes() != before.get("report.json")  # it has the time of its making
        Path(path).unlink()
        before = contents(tmp_path)


def test_training_follows_a_link_to_a_folder_that_does_not_exist(ropecli, llama, text, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "runs" / "new")
    training = ("--data", text, "--steps", 1, "--length", 16, "--set", "gradient_accumulation=1")
    ropecli("finetune", llama, *training, "-o", tmp_path / "link").succeeds()
    assert "config.json" in names(tmp_path / "runs" / "new")


def test_the_home_folder_in_any_path(ropecli, llama, text, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(text.parent)
    (tmp_path / "factors.json").write_text(json.dumps([1.0] * 16))
    (tmp_path / "recipe.yaml").write_text("data: demo-train\nlength: 64\n")
    for command in (
        ["compare", llama, "--data=~/data", *MEASURED, "--methods=none", "--output=~/report.json", "--plot=~/plot.svg"],
        ["theory", llama, "--methods=yarn", "--factor=4", "--plot=~/plot.png"],
        ["report", "~/report.json", "--output=~/page.html"],
        ["patch", llama, "--method", "longrope", "--factor", 2, "--factors-file=~/factors.json", "--output=~/patched"],
        ["plan", "~/patched", "--recipe=~/recipe.yaml"],
        ["export", "~/patched", "--engine", "trl", "--output=~/trl.yaml"],
    ):
        ropecli(*command).succeeds()
    ropecli("merge", "~/data", "--output=~/whole").is_refused(text.parent)
    assert {"trl.yaml", "report.json", "plot.svg", "plot.png", "page.html", "patched"} <= names(tmp_path)
    assert names(text.parent) == {"text.txt"}
