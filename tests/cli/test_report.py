"""ropecli report, with real reports."""

import shutil
import xml.etree.ElementTree as ET

import ropecli as package


def test_a_page_is_written_over_an_earlier_one_and_not_over_its_report(ropecli, llama, corpus, tmp_path):
    page, report, measured = tmp_path / "page.html", tmp_path / "report.html", tmp_path / "several.json"
    few = {"data": str(corpus), "lengths": [32, 64, 128], "max_documents": 3}
    package.compare([str(llama)], **few, methods=["none", "linear"], output=measured)
    for _ in range(2):
        assert ropecli("report", measured, "--output", page) == (0, f"page: {page}\n", "")
    ET.fromstring(page.read_text(encoding="utf-8"))
    shutil.copy(measured, report)
    ropecli("report", report, "--output", report).is_refused("report.html exists and is not a plot or page of ropecli")
    assert report.read_bytes() == measured.read_bytes()
