"""ropecli plot, from real reports: pictures and charts, and what it refuses."""

import json

import pytest


@pytest.fixture(scope="module")
def files(tmp_path_factory, llama, corpus):
    """Reports as the commands write them."""
    import sys
    from unittest import mock

    from ropecli.cli.app import main

    folder = tmp_path_factory.mktemp("reports")
    common = [str(llama), "--data", str(corpus), "--lengths", "32,64,128", "--max-documents", "3"]
    for arguments in (
        ["eval-ppl", *common, "--output", str(folder / "one.json")],
        ["eval-ppl", *common, "--protocol", "tail", "--output", str(folder / "tail.json")],
        ["compare", *common, "--methods", "none,linear,yarn", "--output", str(folder / "several.json")],
    ):
        with mock.patch.object(sys, "argv", ["ropecli", *arguments]), pytest.raises(SystemExit) as stop:
            main()
        assert not stop.value.code
    return folder


def test_the_terminal_alone_without_an_output(ropecli, files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = ropecli("plot", files / "several.json")
    assert (result.code, result.err) == (0, "")
    assert "protocol prefix" in result.out
    for index, report in enumerate(json.loads((files / "several.json").read_text())):
        name = report["method"] if report["method"] == "none" else f"{report['method']} ×4"
        assert f"{'abc'[index]}  {name}: {report['rows'][-1]['ppl']:.2f} at 128" in result.out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["perplexity", "context", "comparison"])
@pytest.mark.parametrize("name", ["plot.png", "plot.svg", "plot.pdf"])
def test_a_picture_of_every_kind(ropecli, files, tmp_path, kind, name):
    result = ropecli("plot", files / "one.json", files / "several.json", "--kind", kind, "-o", tmp_path / name)
    assert (result.code, result.err) == (0, "")
    assert result.out == f"plot: {tmp_path / name}\n"
    assert (tmp_path / name).stat().st_size > 5000


def test_bits_per_byte(ropecli, files):
    result = ropecli("plot", files / "one.json", "--metric", "bits-per-byte")
    assert result.code == 0
    assert "bits per byte" in result.out


def test_retrieval(ropecli, tmp_path):
    from ropecli.evaluate.report import Cell, RetrievalReport, write_report

    report = RetrievalReport(
        checkpoint="folder",
        digest="0" * 64,
        method="none",
        factor=1.0,
        params={},
        in_memory=False,
        original_max_position_embeddings=64,
        source="demo",
        dtype="float32",
        device="cpu",
        command=["ropecli", "passkey"],
        task="passkey",
        mode="generate",
        settings={},
        fingerprint="2" * 64,
        chance=0.1,
        cells=[Cell(64, 0.0, 4, 3), Cell(128, 0.0, 4, 1)],
    )
    write_report(tmp_path / "found.json", report.as_json())
    result = ropecli("plot", tmp_path / "found.json", "-o", tmp_path / "found.svg")
    assert result.code == 0
    assert "passkey" in (tmp_path / "found.svg").read_text()
    assert "75" in ropecli("plot", tmp_path / "found.json").out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["missing.json"], "missing.json cannot be read"),
        (["one.json", "tail.json"], "different protocols"),
        (["one.json", "--kind", "contxt"], "Did you mean 'context'"),
        (["one.json", "--kind", "retrieval"], "does not draw a perplexity report"),
        (["one.json", "--metric", "nll"], "Unknown metric 'nll'"),
        (["one.json", "--kind", "context", "--metric", "bits-per-byte"], "an axis of its own"),
        (["one.json", "--output", "plot.docx"], "no ending that can be drawn"),
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


def test_signs_that_an_encoding_has_not_have_stand_ins():
    from io import BytesIO, TextIOWrapper

    from rich.table import Table
    from rich.text import Text

    from ropecli.cli.terminal import _Console

    for encoding, expected in (("ascii", "yarn x4 - +/-1..."), ("utf-8", "yarn ×4 – ±1…")):
        file = TextIOWrapper(BytesIO(), encoding=encoding, errors="replace")
        table = Table(expected, "length")
        table.add_row(Text("yarn ×4 – ±1…"), "256")
        console = _Console(file=file, width=60)
        console.print("yarn ×4 – ±1…")
        console.print(table)
        file.flush()
        text = file.buffer.getvalue().decode(encoding)
        assert text.startswith(f"{expected}\n")
        assert text.count(expected) == 3
        assert "?" not in text
