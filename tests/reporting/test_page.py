"""The page contains every number and fact, loads no external resources, and escapes all names."""

import base64
import math
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace

import pytest

from ropecli.evaluation.protocol_descriptions import PROTOCOLS
from ropecli.reporting.page import render_page


def texts(tree, tag):
    return ["".join(element.itertext()) for element in tree.iter(tag)]


def rows_of(tree):
    return [["".join(cell.itertext()) for cell in row] for row in tree.iter("tr")]


@pytest.fixture
def page(report, with_baseline, retrieval):
    yarn = replace(report(30.0, 31.0, 32.0), protocol="yarn")
    found = retrieval({(256, 0.0): 4, (256, 0.5): 3, (512, 0.0): 1})
    linear = report(19.0, 19.5, 30.0, method="linear", factor=4.0)
    return ET.fromstring(render_page([with_baseline, linear, yarn, found]))


def test_every_number_is_there(page, with_baseline):
    cells = Counter(texts(page, "td"))
    for row in (*with_baseline.rows, *with_baseline.baseline.rows):
        numbers = (f"{row.ppl:.2f}", f"{row.ppl_low:.2f} to {row.ppl_high:.2f}", f"{row.nll:.4f}", f"{row.tokens}")
        for number in (*numbers, f"{row.bits_per_byte:.4f}", f"{row.tokens_per_second:.0f}", "2.0 s", "3 MiB"):
            assert cells[number], number
    assert cells["4/4"] == cells["3/4"] == cells["1/4"] == 1


def test_headlines_protocols_and_facts_are_there(page, with_baseline):
    paragraphs = texts(page, "p")
    assert "short-context cost: +1.2% (0.3 to 2.0) at 256 tokens" in paragraphs
    assert PROTOCOLS["prefix"].definition in paragraphs
    assert PROTOCOLS["yarn"].definition in paragraphs
    facts = texts(page, "dd")
    for fact in (with_baseline.digest, with_baseline.fingerprint, "256 tokens", "passkey (generate)", "10%"):
        assert fact in facts
    assert any(with_baseline.environment["torch"] in fact for fact in facts)
    assert "ropecli eval-ppl extended --data demo" in texts(page, "code")


def test_pictures_are_data_and_nothing_is_fetched(page):
    # three of the prefix reports, two of the yarn one, a heat map
    pictures = list(page.iter("img"))
    assert len(pictures) == 6
    for picture in pictures:
        kind, _, data = picture.get("src").partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(data).startswith(b"\x89PNG")
        assert "protocol" in picture.get("alt") or "keys found" in picture.get("alt")
    assert not {element.tag for element in page.iter()} & {
        "script",
        "link",
        "iframe",
        "object",
        "embed",
        "base",
        "form",
    }
    assert not [name for element in page.iter() for name in element.attrib if name in ("href", "id", "onload")]
    assert "url(" not in " ".join(texts(page, "style"))
    policy = next(one.get("content") for one in page.iter("meta") if one.get("http-equiv"))
    assert policy.startswith("default-src 'none'")


MARKUP = "<script>alert(1)</script>'\"><img src=x onerror=alert(1)></title>--><!--{{ 7 * 7 }}]]>&lt;$\\frac"


@pytest.mark.parametrize("name", [MARKUP, "\x00\x1b[31m"], ids=["markup", "controls"])
def test_no_name_is_markup(report, retrieval, tuning, name):
    hostile = {"checkpoint": name, "source": name}
    everywhere = {"digest": name, "fingerprint": name, "dtype": name, "device": name, "settings": {name: name}}
    everywhere |= {"command": ["ropecli", name], "environment": {name: name}, "params": {name: name}, "method": name}
    base = report(18.0, 25.0, 47.0, **hostile)
    one = replace(base, **everywhere, baseline=base, document_names=[name] * 4)
    found = replace(retrieval({(256, 0.0): 4}, **hostile), **everywhere, task=name, mode=name)
    run = replace(tuning("heads", points=2, **hostile), **everywhere, level=name)
    run = replace(run, gains=[replace(layer, name=name) for layer in run.gains])
    text = render_page([one, replace(base, checkpoint="other", digest="2"), found, run])
    tree = ET.fromstring(text)
    assert "script" not in {element.tag for element in tree.iter()}
    assert {picture.get("src")[:5] for picture in tree.iter("img")} == {"data:"}
    assert not [name for element in tree.iter() for name in element.attrib if name.startswith("on")]
    assert not {"\x00", "\x1b"} & set(text)
    if "\x00" not in name:
        assert texts(tree, "dd").count(name) > 10


def test_tunings_have_their_numbers_plots_and_facts(tuning):
    run = tuning("heads")
    tree = ET.fromstring(render_page([run]))
    assert texts(tree, "h1") == ["Tuning of demo"]
    assert texts(tree, "h2") == ["demo, yarn ×4: tuning (heads)"]
    spent = sum(point.seconds for point in run.points if point.level == "grid")
    result = [f"{math.exp(value):.2f}" for value in (run.score.window, run.score.target)]
    assert rows_of(tree) == [
        ["model", "perplexity at 256", "at 1024", "documents", "learned parameters", "time"],
        ["as pretrained", "13.55", "47.03", "16", "–", "–"],
        ["yarn ×4, nothing tuned", "15.47", "14.91", "16", "–", "–"],
        ["yarn ×4, best constants", "14.43", "14.31", "16", "0", f"{spent:.1f} s"],
        ["yarn ×4, tuned (heads, step 100)", *result, "16", "513", "1 min 52 s"],
    ]
    assert len(list(tree.iter("img"))) == 3
    assert {run.digest, "1024 tokens", '{"beta_fast": 8.0, "beta_slow": 0.5}'} <= set(texts(tree, "dd"))
    assert texts(tree, "code") == ["ropecli tune demo --level heads"]
