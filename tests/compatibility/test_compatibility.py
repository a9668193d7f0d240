"""Folders and reports that earlier releases wrote (see `make`) are read, patched again, reverted and drawn."""

import json
import re
import shutil
from pathlib import Path

import pytest

WRITTEN = Path(__file__).parent
FOLDERS = {
    "base": ("none", 1.0, 64),
    "patched": ("yarn", 2.0, 128),
    "patched-twice": ("linear", 4.0, 256),
    "distance": ("rerope", 2.0, 128),
    "fine-tuned": ("yarn", 2.0, 128),
    "tuned-grid": ("yarn", 2.0, 128),
    "tuned-heads": ("yarn", 2.0, 128),
    "tuned-lora": ("yarn", 2.0, 128),
    "tuned-search": ("longrope", 2.0, 128),
}


@pytest.fixture
def written(tmp_path, monkeypatch) -> Path:
    """A copy, as the current folder: the records name each other by relative paths."""
    folder = tmp_path / "written"
    shutil.copytree(WRITTEN, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_says_what_it_is(ropecli, written, name):
    outcome = ropecli("inspect", name, "--json")
    assert outcome.code == 0, outcome.err
    seen = json.loads(outcome.out)
    assert (seen["method"], seen["factor"], seen["target_length"]) == FOLDERS[name]
    assert seen["original_max_position_embeddings"] == 64
    assert seen["tuned_from"] == ("base" if name in ("tuned-heads", "tuned-lora") else None)


@pytest.mark.parametrize("name", ["patched", "patched-twice", "distance", "fine-tuned", "tuned-grid"])
def test_a_patched_folder_is_patched_again_and_reverted_to_its_base(ropecli, written, name):
    again = ropecli("patch", name, "--method", "yarn", "--factor", 4, "--output", "again", "--json")
    assert again.code == 0, again.err
    assert json.loads(again.out)["target_length"] == 256
    assert ropecli("revert", "again", "--output", "reverted").code == 0
    assert (written / "reverted" / "config.json").read_text() == (written / "base" / "config.json").read_text()


def test_weights_that_were_tuned_are_not_reverted(ropecli, written):
    outcome = ropecli("revert", "tuned-heads", "--output", "reverted")
    assert outcome.code == 2
    assert "base" in outcome.err


EARLIER = "digest is of an earlier release, which covers only the ends of each weight file"


def test_a_report_belongs_to_its_folder_by_the_digest_of_then(ropecli, written, earlier_digest):
    push = ["push", "patched", "--repo", "me/tiny", "--dry-run", "--report"]
    outcome = ropecli(*push, "reports/tail.json")
    assert outcome.code == 0, outcome.err
    assert outcome.err.count(EARLIER) == 1
    assert ropecli(*push, "reports/prefix.json").code == 2


def test_an_adapter_on_the_base_as_it_was_before_the_patch_is_measured_and_merged(
    ropecli, written, corpus, earlier_digest
):
    merged = ropecli("merge", "adapter", "--output", "whole")
    assert merged.code == 0
    assert merged.err.count(EARLIER) == 1
    assert "different weights" not in merged.err
    losses = []
    for name in ("adapter", "whole"):
        outcome = ropecli("eval-ppl", name, "--data", corpus, "--max-documents", 2, "--lengths", "128", "--json")
        assert outcome.code == 0, outcome.err
        losses.append(json.loads(outcome.out)["rows"][0]["nll"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("name", ["distance", "fine-tuned", "tuned-search"])
def test_a_folder_is_measured(ropecli, written, corpus, name):
    outcome = ropecli("eval-ppl", name, "--data", corpus, "--max-documents", 1, "--lengths", "128", "--json")
    assert outcome.code == 0, outcome.err


@pytest.mark.parametrize(
    ("kind", "reports"),
    [
        ("perplexity", ["reports/tail.json"]),
        ("perplexity", ["reports/prefix.json"]),
        ("comparison", ["reports/compare.json", "reports/study.json"]),
        ("retrieval", ["reports/passkey.json", "reports/needle.json"]),
        ("perplexity", ["reports/longppl.json"]),
        ("ruler", ["reports/ruler.json", "reports/ruler-generate.json"]),
        ("tuning", ["tuned-grid/tune.json"]),
        ("tuning", ["tuned-search/tune.json"]),
        ("tuning", ["tuned-heads/tune.json"]),
    ],
)
def test_reports_are_drawn(ropecli, written, kind, reports):
    outcome = ropecli("plot", *reports, "--kind", kind, "--output", "plot.png")
    assert outcome.code == 0, outcome.err
    assert (written / "plot.png").stat().st_size > 10_000


def test_all_reports_make_one_page(ropecli, written):
    reports = [*sorted(Path("reports").glob("*.json")), *sorted(Path().glob("tuned-*/tune.json"))]
    assert len(reports) == 14
    outcome = ropecli("report", *reports, "--output", "page.html")
    assert outcome.code == 0, outcome.err
    assert all(name in (written / "page.html").read_text() for name in ("passkey", "sliding", "tuned"))


def shown_numbers(name: str) -> set[tuple[str, ...]]:
    """The first cells of the rows that the page's tables must have for these files, by the files' own JSON."""
    values = json.loads((WRITTEN / "reports" / f"{name}.json").read_text())
    if name == "longppl":
        return {
            (f"{row['length']}", f"{row['ppl']:.2f}")
            for report in (values, values["baseline"])
            for row in report["rows"]
        }
    scores: dict[str, list[float]] = {}
    if name in ("passkey", "needle"):
        for cell in values["cells"]:
            scores.setdefault(f"{cell['depth']:g}", []).append(cell["hits"] / cell["trials"])
    else:
        for cell in values[0]["cells"]:
            scores.setdefault(cell["task"], []).append(sum(cell["scores"]) / len(cell["scores"]))
    return {(row, *(f"{100 * score:.0f}" for score in shares)) for row, shares in scores.items()}


@pytest.mark.parametrize("name", ["longppl", "ruler", "ruler-generate", "passkey", "needle"])
def test_a_page_shows_the_numbers_of_its_report(ropecli, written, name):
    assert ropecli("report", f"reports/{name}.json", "--output", "page.html").code == 0
    rows = re.findall(r"<tr.*?</tr>", (written / "page.html").read_text(), re.DOTALL)
    cells = [
        [re.sub(r"<[^>]*>", "", cell) for cell in re.findall(r"<t[hd].*?</t[hd]>", row, re.DOTALL)] for row in rows
    ]
    for expected in shown_numbers(name):
        assert list(expected) in [row[: len(expected)] for row in cells]


def test_saved_key_tokens_are_those_of_their_report(written):
    from ropecli.evaluation.tasks.key_tokens import read_key_tokens

    keys, report = read_key_tokens(Path("keys.json")), json.loads(Path("reports/longppl.json").read_text())
    assert keys.settings == report["settings"]["keys"]
    assert [document.name for document in keys.documents] == report["document_names"]
