"""ropecli report, with real reports."""

import xml.etree.ElementTree as ET

import ropecli as package


def test_a_page_replaces_an_existing_file_with_overwrite_alone(ropecli, llama, corpus, tmp_path):
    page, measured = tmp_path / "page.html", tmp_path / "several.json"
    few = {"data": str(corpus), "lengths": [32, 64, 128], "max_documents": 3}
    package.compare([str(llama)], **few, methods=["none", "linear"], output=measured)
    page.write_text("mine")
    ropecli("report", measured, "--output", page).is_refused("page.html exists", "replace it with --overwrite")
    assert page.read_text() == "mine"
    assert ropecli("report", measured, "--output", page, "--overwrite") == (0, f"page: {page}\n", "")
    ET.fromstring(page.read_text(encoding="utf-8"))
