"""ropecli plot, with real reports and a checkpoint: output files, and refusals."""

import json
import shutil
import sys
import xml.etree.ElementTree as ET
from unittest import mock

import pytest

from ropecli.reporting.plot_kinds import DEFAULT_METHODS, STUDY_KINDS


@pytest.fixture(scope="module")
def files(tmp_path_factory, llama, corpus):
    """Reports as the commands write them."""
    from ropecli.cli.app import main

    folder = tmp_path_factory.mktemp("reports")
    common = [str(llama), "--data", str(corpus), "--lengths", "32,64,128", "--max-documents", "3"]
    for arguments in (
        ["eval-ppl", *common, "--output", str(folder / "one.json")],
        ["eval-ppl", *common, "--protocol", "tail", "--output", str(folder / "tail.json")],
        ["compare", *common, "--methods", "none,linear,yarn", "--output", str(folder / "several.json")],
        ["needle", str(llama), "--lengths", "64", "--depths", "0,1", "--trials", "1", "-o", str(folder / "found.json")],
    ):
        with mock.patch.object(sys, "argv", ["ropecli", *arguments]), pytest.raises(SystemExit) as stop:
            main()
        assert not stop.value.code
    return folder


def texts(path):
    return ["".join(element.itertext()) for element in ET.parse(path).iter() if element.tag.endswith("}text")]


def test_a_png_beside_the_first_report(ropecli, files, tmp_path, monkeypatch):
    reports = shutil.copytree(files, tmp_path / "reports")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # an earlier plot is replaced
        result = ropecli("plot", "reports/several.json", "reports/one.json")
        assert (result.code, result.out, result.err) == (0, "plot: reports/several.png\n", "")
    assert (reports / "several.png").read_bytes().startswith(b"\x89PNG")
    (reports / "one.png").write_text("mine")
    result = ropecli("plot", "reports/one.json")
    assert (result.code, result.out) == (2, "")
    assert "one.png exists and is not a plot or page of ropecli, so it is not overwritten" in result.err
    assert (reports / "one.png").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["reports"]


def test_no_picture_lands_in_a_checkpoints_folder(ropecli, files, llama, tmp_path, monkeypatch):
    folder = shutil.copytree(llama, tmp_path / "checkpoint")
    shutil.copy(files / "one.json", folder / "tune.json")
    cached = tmp_path / "models--me--mine" / "snapshots" / "1"
    shutil.copytree(files, cached)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for report in (folder / "tune.json", cached / "one.json"):
        name = f"{report.stem}.png"
        assert ropecli("plot", report).out == f"plot: {name}\n"
        assert (here / name).exists()
    monkeypatch.chdir(folder)
    for arguments in (["tune.json"], ["demo", "--kind", "frequencies"]):
        result = ropecli("plot", *arguments)
        assert (result.code, result.out) == (2, "")
        assert "would be in a checkpoint's folder. Choose another place with --output." in result.err
    assert not list(tmp_path.glob("[cm]*/**/*.png"))


@pytest.mark.parametrize(
    ("kind", "name"), [("perplexity", "plot.svg"), ("perplexity", "plot.pdf"), ("comparison", "plot.PNG")]
)
def test_a_picture_of_every_kind_and_format(ropecli, files, tmp_path, kind, name):
    result = ropecli("plot", files / "one.json", files / "several.json", "--kind", kind, "-o", tmp_path / name)
    assert (result.code, result.out, result.err) == (0, f"plot: {tmp_path / name}\n", "")
    start = {"svg": b"<?xml", "pdf": b"%PDF", "PNG": b"\x89PNG"}[name.rpartition(".")[2]]
    assert (tmp_path / name).read_bytes().startswith(start)


def test_bits_per_byte_and_retrieval(ropecli, files, tmp_path):
    plot = tmp_path / "plot.svg"
    assert ropecli("plot", files / "one.json", "--metric", "bits-per-byte", "-o", plot).code == 0
    assert "bits per byte (lower is better)" in texts(plot)
    assert ropecli("plot", files / "found.json", "-o", plot).code == 0
    assert "depth of the key (0: start, 1: end)" in texts(plot)


def test_different_data_are_warned_of(ropecli, files, tmp_path):
    value = json.loads((files / "one.json").read_text())
    (tmp_path / "other.json").write_text(json.dumps({**value, "fingerprint": "2" * 64}))
    result = ropecli("plot", tmp_path / "other.json", files / "one.json")
    assert result.code == 0
    assert "warning: different data" in result.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["one.json", "found.json"], "different kinds"),
        (["one.json", "--kind", "retrieval"], "cannot draw a perplexity report"),
        (["found.json", "--kind", "scores", "--metric", "bits-per-byte"], "works only for plots of perplexity"),
        (["one.json", "--output", "plot.docx"], "unknown image format"),
        (["one.json", "--output", "one.json/plot.png"], "could not be written"),
    ],
)
def test_what_cannot_be_drawn_is_said_in_one_message(ropecli, files, monkeypatch, arguments, expected):
    monkeypatch.chdir(files)
    before = sorted(files.iterdir())
    result = ropecli("plot", *arguments)
    assert (result.code, result.out) == (2, "")
    assert expected in result.err
    assert "Traceback" not in result.err
    assert sorted(files.iterdir()) == before


@pytest.mark.parametrize("kind", STUDY_KINDS)
def test_a_checkpoint_is_drawn_by_every_kind(ropecli, llama, tmp_path, kind):
    assert ropecli("plot", llama, "--kind", kind, "-o", tmp_path / "plot.svg").code == 0
    assert all(f"{method} ×4" in (tmp_path / "plot.svg").read_text() for method in DEFAULT_METHODS[kind])


def test_methods_with_their_parameters(ropecli, llama, tmp_path):
    chosen = ["-k", "frequencies", "--methods", "yarn,abf", "--factor", "8", "--set"]
    for name, beta in (("a.svg", 50), ("b.svg", 500)):
        assert ropecli("plot", llama, *chosen, f"abf.beta={beta}", "-o", tmp_path / name).code == 0
        assert {"yarn ×8", f"abf ×8 (beta {beta})"} <= set(texts(tmp_path / name))
