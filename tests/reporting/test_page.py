"""The page contains every number and fact, loads no external resources, and escapes all names."""

import base64
import json
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace

import pytest

from ropecli.evaluation.protocols import PROTOCOLS
from ropecli.reporting.page import render_page
from ropecli.table import clean


def texts(tree, tag):
    return ["".join(element.itertext()) for element in tree.iter(tag)]


def rows_of(tree):
    return [["".join(cell.itertext()) for cell in row] for row in tree.iter("tr")]


@pytest.fixture(scope="module")
def page(report, with_baseline, retrieval):
    yarn = report(30.0, 31.0, 32.0, task="yarn")
    passkey = retrieval({(256, 0.0): 4, (256, 0.5): 3, (512, 0.0): 1})
    linear = report(19.0, 19.5, 30.0, method="linear", factor=4.0)
    return ET.fromstring(render_page([*with_baseline, linear, yarn, passkey]))


def test_every_number_is_there(page, with_baseline):
    cells = Counter(texts(page, "td"))
    base, extended = with_baseline
    for cell in (*base.cells, *extended.cells):
        numbers = (f"{cell.ppl:.2f}", f"{cell.low:.2f} to {cell.high:.2f}", f"{cell.value:.4f}", f"{cell.tokens}")
        for number in (*numbers, f"{cell.bits_per_byte:.4f}", f"{cell.tokens_per_second:.0f}", "2 s", "3.1 MB"):
            assert cells[number], number
    assert ["0.5", "75", "–"] in rows_of(page)
    change = extended.change_from(base, 256)
    assert cells[f"{100 * change.change:+.1f} ({100 * change.low:.1f} to {100 * change.high:.1f})"]


def test_the_headlines_come_first_then_each_set_of_data_and_how_it_was_measured(page, with_baseline):
    start = "Perplexity, protocol tail, 4 documents: "
    assert [text.partition("% (")[0] for text in texts(page, "p")[:2]] == [
        f"{start}short-context cost: +11.1",
        f"{start}long-context gain: -5.6",
    ]
    assert texts(page, "p")[2] == "folder, none: passkey, 25.0% (5 to 70) at 512 tokens."
    titles = texts(page, "h2")
    assert titles[0].startswith("2 checkpoints: perplexity by checkpoint, method and length, protocol tail, ")
    assert titles[0].endswith("data demo, 4 documents")
    passkey = "folder: passkey, score in percent, answers generated, data demo, 12 prompts"
    assert titles[3:] == [passkey, "How it was measured"]
    assert len(list(page.iter("dl"))) == 5
    assert {f"Protocol {name}: {PROTOCOLS[name].definition}" for name in ("prefix", "yarn")} <= set(texts(page, "p"))
    assert {with_baseline[1].digest, with_baseline[1].fingerprint, "12 prompts"} <= set(texts(page, "dd"))
    assert "folder, none: passkey, answers generated" in texts(page, "h3")
    assert "ropecli eval-ppl extended --data demo" in texts(page, "code")


def test_pictures_are_embedded_and_nothing_is_fetched(page):
    # of base and extension, of the linear and of the yarn one, a heat map
    pictures = [picture.get("src").partition(",") for picture in page.iter("img")]
    assert [kind for kind, _, _ in pictures] == ["data:image/png;base64"] * 4
    assert all(base64.b64decode(data).startswith(b"\x89PNG") for _, _, data in pictures)
    loading = {"script", "link", "iframe", "object", "embed", "base", "form"}
    assert not loading & {element.tag for element in page.iter()}
    assert not [name for element in page.iter() for name in element.attrib if name in ("href", "id", "onload")]
    assert "url(" not in " ".join(texts(page, "style"))
    (policy,) = [meta.get("content") for meta in page.iter("meta") if meta.get("http-equiv")]
    assert policy.startswith("default-src 'none'")


MARKUP = "<script>alert(1)</script>'\"><img src=x onerror=alert(1)></title>--><!--{{ 7 * 7 }}]]>&lt;$\\frac"


def test_names_are_neither_markup_nor_control_characters(report, retrieval, tuning):
    name = f"{MARKUP}\x00\x1b[31m"
    hostile = {"checkpoint": name, "source": name}
    everywhere = {"digest": name, "fingerprint": name, "dtype": name, "device": name, "settings": {name: name}}
    everywhere |= {"command": ["ropecli", name], "environment": {name: name}, "params": {name: name}}
    base = report(18.0, 25.0, 47.0, **hostile)
    first = replace(base, **everywhere, document_names=[name] * 4)
    scores = replace(retrieval({(256, 0.0): 4}, **hostile), **everywhere, task=name)
    run = replace(tuning("heads", **hostile), **everywhere, level=name)
    run = replace(run, gains=[replace(layer, name=name) for layer in run.gains])
    text = render_page([first, replace(base, checkpoint="other", digest="2"), scores, run])
    tree = ET.fromstring(text)
    assert "script" not in {element.tag for element in tree.iter()}
    assert {picture.get("src")[:5] for picture in tree.iter("img")} == {"data:"}
    assert not [name for element in tree.iter() for name in element.attrib if name.startswith("on")]
    assert not {"\x00", "\x1b"} & set(text)
    assert texts(tree, "dd").count(clean(name, 1000)) > 10


def test_a_tuning_run_has_its_table_and_facts(tuning):
    run = tuning("heads")
    tree = ET.fromstring(render_page([run]))
    scored = "base: scores of the last 32 tokens of 3 calibration documents of text"
    assert texts(tree, "h2") == [scored, "How it was measured"]
    assert texts(tree, "h3") == ["base, yarn ×2 (beta_fast 23.3, attention_factor 1.41): tuning (heads)"]
    assert rows_of(tree)[1] == ["as pretrained", "1300.00", "1600.00", "–", "–"]
    assert {run.digest, "128 tokens", json.dumps(run.params)} <= set(texts(tree, "dd"))
    assert texts(tree, "code") == [" ".join(run.command)]
