"""The page answers "which method" first, contains every number and fact, loads nothing, and escapes all names."""

import json
import os
import shutil
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from ropecli.options import PROTOCOLS
from ropecli.reporting.lines import sets_of
from ropecli.reporting.page import render_page
from ropecli.table import clean

SVG = "{http://www.w3.org/2000/svg}"


def texts(tree, tag):
    return ["".join(element.itertext()) for element in tree.iter(tag)]


def rows_of(tree):
    return [["".join(cell.itertext()) for cell in row] for row in tree.iter("tr")]


@pytest.fixture(scope="module")
def page(report, with_baseline, retrieval):
    yarn = report(30.0, 31.0, 32.0, task="sliding")
    needle = retrieval({(256, 0.0): 4, (256, 0.5): 3, (512, 0.0): 1})
    linear = report(19.0, 19.5, 30.0, method="linear", factor=4.0)
    return ET.fromstring(render_page([*with_baseline, linear, yarn, needle]))


def test_every_number_is_there(page, with_baseline):
    cells = Counter(texts(page, "td"))
    base, extended = with_baseline
    for cell in (*base.cells, *extended.cells):
        numbers = (f"{cell.ppl:.2f}", f"{cell.low:.2f} to {cell.high:.2f}", f"{cell.value:.4f}", f"{cell.tokens}")
        for number in (*numbers, f"{cell.bits_per_byte:.4f}"):
            assert cells[number], number
    assert ["0.5", "75", "–"] in rows_of(page)
    change = extended.change_from(base, 256)
    assert cells[f"{100 * change.change:+.1f}% ({100 * change.low:.1f} to {100 * change.high:.1f})"]


def test_one_verdict_one_table_and_one_figure_come_first(page, with_baseline):
    (main,) = page.iter("main")
    shown = [element for element in main if element.tag != "details"]
    assert ["".join(element.itertext()) for element in main.iter("h1")] == ["base, 256 → 1024 tokens"]
    assert sum(len(list(element.iter("table"))) for element in shown) == 1
    assert [element.tag for element in shown].count("figure") == 1
    table = rows_of(shown[[element.tag for element in shown].index("div")])
    # what only others were measured by is below
    assert [row[0] for row in table] == ["", "extended (yarn ×4)", "base (base)"]
    assert table[0][1:] == ["cost at 256", "perplexity (tail) at 1024", "runs in"]
    assert [picture.get("role") for picture in page.iter(f"{SVG}svg")] == ["img", "img"]
    alternatives = [picture.get("aria-label") for picture in page.iter(f"{SVG}svg")]
    assert alternatives[0] == "perplexity at 1024 tokens: base (base) 47.00, extended (yarn ×4) 17.00"
    assert "change from the base: extended (yarn ×4) -63.8%" in alternatives[1]
    assert {f"Protocol {name}: {PROTOCOLS[name]}." for name in ("prefix", "sliding")} <= set(texts(page, "p"))
    assert {with_baseline[1].fingerprint, "12 prompts"} <= set(texts(page, "dd"))
    assert any(with_baseline[1].weights in text for text in texts(page, "dd"))
    assert "ropecli eval-ppl extended --data demo" in texts(page, "code")


def test_nothing_is_fetched(page):
    loading = {"script", "link", "iframe", "object", "embed", "base", "form", "img"}
    assert not loading & {element.tag for element in page.iter()}
    references = [value for element in page.iter() for name, value in element.attrib.items() if name.endswith("href")]
    assert all(value.startswith("#") for value in references)
    assert "url(" not in " ".join(texts(page, "style"))
    (policy,) = [meta.get("content") for meta in page.iter("meta") if meta.get("http-equiv")]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"


EIGHT = (0.2, 0.5, 1.4, 1.9, 0.3, 0.6, 1.5, 1.6)
NONE, SMALL = (0.0,) * 8, (0.01, 0.012, 0.009, 0.011) * 2
LOWER, LOWEST, EITHER = (-0.5, -0.6, -0.4, -0.5) * 2, (-0.9, -1.0, -0.8, -0.9) * 2, (-0.4, -0.6, -0.7, -0.3) * 2


@pytest.fixture(scope="module")
def situations(report, changed):
    """By name: reports, and the beginnings of the sentences of their verdict."""
    base = report(20.0, 25.0, 47.0, shares=EIGHT)
    yarn, better = changed(base, "yarn", SMALL, LOWER, LOWER), changed(base, "ntk", SMALL, LOWER, LOWEST)
    equal = changed(base, "ntk", SMALL, LOWER, EITHER)
    rerope, cheap = changed(base, "rerope", NONE, LOWER, LOWEST), changed(base, "ntk", NONE, LOWER, EITHER)
    few = report(20.0, 25.0, 47.0, shares=EIGHT[:6])
    leading = changed(few, "yarn", SMALL[:6], LOWER[:6], LOWER[:6])
    return {
        "certain": (
            [base, yarn, better],
            ["Best: ntk ×4.", "It costs +1.1% (1.0 to 1.2) at 256 tokens. Perplexity at"],
        ),
        "none certain": ([base, equal, yarn], ["No method is certainly best. ", "It costs +1.1%"]),
        "cheaper": ([base, yarn, cheap], ["Best: ntk ×4.", "It costs nothing measurable at 256 tokens: +0.0%"]),
        "too few": ([few, leading], ["Too few documents to tell (6): yarn ×4 leads at 1024 tokens.", "Perplexity at"]),
        "not stock": (
            [base, rerope, yarn],
            ["Best: rerope ×4.", "It costs nothing", "It needs ropecli; best in stock software: yarn ×4."],
        ),
        "alone": (
            [replace(base, cells=base.cells[:1]), yarn],
            [
                "Only yarn ×4 was measured at 1024 tokens.",
                "It costs +1.1% (1.0 to 1.2) at 256 tokens. Perplexity at 1024",
            ],
        ),
        "base": ([base, changed(base, "yarn", SMALL, SMALL, SMALL)], ["No method is certainly better than the base."]),
    }


def verdict_of(tree):
    return ["".join(element.itertext()) for element in tree.iter("p") if element.get("class") == "verdict"]


@pytest.mark.parametrize("name", ["certain", "none certain", "cheaper", "too few", "not stock", "alone", "base"])
def test_the_verdict(situations, name):
    reports, expected = situations[name]
    for order in (reports, [reports[0], *reversed(reports[1:])]):  # the first is the base
        sentences = verdict_of(ET.fromstring(render_page(order)))
        assert [text[: len(begin)] for text, begin in zip(sentences, expected, strict=True)] == expected


def test_runs_of_one_job_are_one_comparison(report, changed):
    """On 8 and 16 documents, with the base under two names, and one scaling as a method and as a folder."""
    names = [f"document {number}" for number in range(16)]
    few = report(20.0, 25.0, 47.0, shares=EIGHT, documents=names[:8], scaling="none", checkpoint="./folder")
    many = report(20.0, 25.0, 47.0, shares=EIGHT * 2, documents=names, scaling="none", fingerprint="2" * 64)
    patched = changed(few, "yarn", SMALL, LOWER, LOWER)
    saved = changed(many, "yarn", SMALL * 2, LOWER * 2, LOWER * 2)
    saved = replace(saved, checkpoint="y4", in_memory=False)
    linear = changed(few, "linear", SMALL, SMALL, SMALL)
    tuned = replace(changed(many, "yarn", NONE * 2, LOWER * 2, LOWEST * 2), checkpoint="y4-finetuned")
    tuned = replace(tuned, weights="tuned", in_memory=False)
    other = report(9.0, 9.0, 9.0, task="sliding", checkpoint="another", weights="other")
    tree = ET.fromstring(render_page([few, patched, linear, many, saved, tuned, other]))
    assert verdict_of(tree)[0] == "Best: y4-finetuned (yarn ×4)."
    assert texts(tree, "h1") == ["./folder, 256 → 1024 tokens"]
    first, *rows = rows_of(next(tree.iter("table")))
    assert first == ["", "cost at 256", "perplexity (prefix) at 1024", "runs in"]
    shown = ["y4-finetuned (yarn ×4)", "y4 (yarn ×4)", "linear ×4", "./folder (base)"]
    assert [row[0] for row in rows] == shown
    assert not [cell for row in rows[:-1] for cell in row if cell == "–"]
    assert "perplexity (prefix): 8 documents" in " ".join(texts(tree, "p"))
    joined, whole = rows[1][2], f"{saved.cells[2].ppl:.2f}"
    assert joined == f"{patched.cells[2].ppl:.2f}" == whole
    cells = [replace(cell, weights=(2.0,) * 16) for cell in many.cells]  # texts of the same names, of other sizes
    sets = sets_of([few, patched, replace(many, cells=cells)])
    assert [len(lines[0].report.documents) for lines in sets] == [8, 16]


@pytest.fixture(scope="module")
def browser():
    """Chromium, by Playwright."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright, see .github/CONTRIBUTING.md")
    found = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if not found:
        pytest.skip("needs Chromium: install it, or name it in CHROMIUM")
    with playwright.sync_playwright() as started:
        yield started.chromium.launch(executable_path=found, args=["--no-sandbox"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "width", "theme"),
    [
        *[(name, 1400, "light") for name in ("certain", "none certain", "too few", "not stock")],
        *[("not stock", 390, "light"), ("not stock", 1400, "dark"), ("not stock", 390, "dark")],
    ],
)
def test_the_page_in_a_browser(browser, situations, retrieval, tmp_path, name, width, theme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python").Axe()
    reports, expected = situations[name]
    scores = retrieval({(256, 0.0): 4, (256, 0.5): 3, (512, 0.0): 1})
    (tmp_path / "page.html").write_text(render_page([*reports, scores]), "utf-8")
    view = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
    requests: list[str] = []
    view.on("request", lambda request: requests.append(request.url))
    view.goto((tmp_path / "page.html").as_uri())
    shown = view.locator("p.verdict").all_inner_texts()
    assert [text[: len(begin)] for text, begin in zip(shown, expected, strict=True)] == expected
    assert view.locator("table").first.is_visible()
    assert view.locator("details table").first.is_hidden()
    view.evaluate("document.querySelectorAll('details').forEach(element => element.open = true)")
    assert view.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    violations = axe.run(view).response["violations"]
    assert not violations, json.dumps(violations, indent=1)[:3000]
    assert [Path(url).name for url in requests] == ["page.html"]
    paper = view.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(22, 24, 27)"}[theme]
    ink = view.evaluate("getComputedStyle(document.querySelector('svg text')).fill")
    assert ink == {"light": "rgb(26, 26, 26)", "dark": "rgb(230, 230, 230)"}[theme]
    view.close()


MARKUP = "<script>alert(1)</script>'\"><img src=x onerror=alert(1)></title>--><!--{{ 7 * 7 }}]]>&lt;$\\frac"


def test_names_are_neither_markup_nor_control_characters(report, retrieval):
    name = f"{MARKUP}\x00\x1b[31m"
    hostile = {"checkpoint": name, "source": name}
    everywhere = {"weights": name, "fingerprint": name, "dtype": name, "device": name, "settings": {name: name}}
    everywhere |= {"command": ["ropecli", name], "environment": {name: name}, "params": {name: name}}
    base = report(18.0, 25.0, 47.0, **hostile)
    first = replace(base, **everywhere, document_names=[name] * 4)
    scores = replace(retrieval({(256, 0.0): 4}, **hostile), **everywhere, task=name)
    text = render_page([first, replace(base, checkpoint="other", weights="2"), scores])
    tree = ET.fromstring(text)
    assert not {"script", "img"} & {element.tag.rpartition("}")[2] for element in tree.iter()}
    assert not [name for element in tree.iter() for name in element.attrib if name.startswith("on")]
    assert not {"\x00", "\x1b"} & set(text)
    assert texts(tree, "dd").count(clean(name, 1000)) >= 5
