"""ropecli plot and report, with real reports and a checkpoint: output files, and refusals."""

import json
import shutil
import xml.etree.ElementTree as ET

import pytest

import ropecli as package
from ropecli.commands.plot import _DEFAULT_METHODS


@pytest.fixture(scope="module")
def files(tmp_path_factory, llama, corpus):
    """Reports as the commands write them."""
    folder = tmp_path_factory.mktemp("reports")
    few = {"data": str(corpus), "lengths": [32, 64, 128], "max_documents": 3}
    package.eval_ppl(str(llama), **few, output=folder / "one.json")
    package.compare([str(llama)], **few, methods=["none", "linear"], output=folder / "several.json")
    package.needle([str(llama)], lengths=[64], depths=[0, 1], samples=1, output=folder / "found.json")
    return folder


def texts(path):
    return ["".join(element.itertext()) for element in ET.parse(path).iter() if element.tag.endswith("}text")]


def test_a_png_beside_the_first_report(ropecli, files, tmp_path, monkeypatch):
    reports = shutil.copytree(files, tmp_path / "reports")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # an earlier plot is replaced
        assert ropecli("plot", "reports/several.json", "reports/one.json") == (0, "plot: reports/several.png\n", "")
    assert (reports / "several.png").read_bytes().startswith(b"\x89PNG")
    (reports / "one.png").write_text("mine")
    message = "one.png exists and is not a plot or page of ropecli"
    ropecli("plot", "reports/one.json").is_refused(message)
    assert (reports / "one.png").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["reports"]


@pytest.mark.parametrize(
    ("kind", "name", "start"),
    [("lengths", "a.svg", b"<?xml"), ("lengths", "a.pdf", b"%PDF"), ("lengths", "a.PNG", b"\x89PNG")],
)
def test_a_picture_of_every_kind_and_format(ropecli, files, tmp_path, kind, name, start):
    result = ropecli("plot", files / "one.json", files / "several.json", "--kind", kind, "-o", tmp_path / name)
    assert result == (0, f"plot: {tmp_path / name}\n", "")
    assert (tmp_path / name).read_bytes().startswith(start)


def test_retrieval(ropecli, files, tmp_path):
    plot = tmp_path / "plot.svg"
    ropecli("plot", files / "found.json", "-o", plot).succeeds()
    assert "depth of the key (0: start, 1: end)" in texts(plot)


def test_different_data_are_warned_of(ropecli, files, tmp_path):
    value = json.loads((files / "one.json").read_text())
    value["reports"][0]["fingerprint"] = "2" * 64
    (tmp_path / "other.json").write_text(json.dumps(value))
    assert "warning: different data" in ropecli("plot", tmp_path / "other.json", files / "one.json").succeeds().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("found.json one.json", "A plot of kind scores cannot show the perplexity report"),
        ("one.json --kind scores", "cannot show the perplexity report"),
        ("one.json --output plot.docx", "plot.docx does not end in .png or .svg or .pdf"),
        ("one.json --output one.json/plot.png", "could not be written"),
    ],
)
def test_what_cannot_be_drawn_is_refused(ropecli, files, monkeypatch, arguments, message):
    monkeypatch.chdir(files)
    before = sorted(files.iterdir())
    ropecli("plot", *arguments.split()).is_refused(message)
    assert sorted(files.iterdir()) == before


def test_a_checkpoint_is_drawn(ropecli, llama, tmp_path):
    ropecli("plot", llama, "--kind", "frequencies", "-o", tmp_path / "plot.svg").succeeds()
    assert all(f"{method} ×4" in (tmp_path / "plot.svg").read_text() for method in _DEFAULT_METHODS)


def test_a_page_is_written_over_an_earlier_one_and_not_over_its_report(ropecli, files, tmp_path):
    page, report = tmp_path / "page.html", tmp_path / "report.html"
    for _ in range(2):
        assert ropecli("report", files / "several.json", "--output", page) == (0, f"page: {page}\n", "")
    ET.fromstring(page.read_text(encoding="utf-8"))
    shutil.copy(files / "one.json", report)
    ropecli("report", report, "--output", report).is_refused("report.html exists and is not a plot or page of ropecli")
    assert report.read_bytes() == (files / "one.json").read_bytes()
