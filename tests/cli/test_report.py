"""ropecli report: a page from files that the commands wrote."""

import xml.etree.ElementTree as ET

import pytest


@pytest.fixture(scope="module")
def written(tmp_path_factory, llama, corpus):
    import sys
    from unittest import mock

    from ropecli.cli.app import main

    path = tmp_path_factory.mktemp("reports") / "one.json"
    arguments = ["eval-ppl", str(llama), "--data", str(corpus), "--lengths", "32,64", "--max-documents", "2"]
    with (
        mock.patch.object(sys, "argv", ["ropecli", *arguments, "--output", str(path)]),
        pytest.raises(SystemExit) as stop,
    ):
        main()
    assert not stop.value.code
    return path


def test_a_page_is_written_over_an_older_one(ropecli, written, tmp_path):
    page = tmp_path / "page.html"
    assert ropecli("report", written, "--output", page).code == 0
    result = ropecli("report", written, "--output", page)
    assert (result.code, result.out, result.err) == (0, f"page: {page}\n", "")
    tree = ET.fromstring(page.read_text(encoding="utf-8"))
    command = "".join(next(tree.iter("code")).itertext())
    assert command.startswith("ropecli eval-ppl ")
    assert list(tmp_path.iterdir()) == [page]


def test_a_report_is_not_overwritten_by_its_page(ropecli, written, tmp_path):
    report = tmp_path / "report.html"
    report.write_bytes(written.read_bytes())
    result = ropecli("report", report, "--output", report)
    assert (result.code, result.out) == (2, "")
    assert "report.html exists and is not a plot or page of ropecli" in result.err
    assert report.read_bytes() == written.read_bytes()
