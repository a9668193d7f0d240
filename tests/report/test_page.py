"""The page holds every number and fact, fetches nothing, and no name in it is markup."""

import math
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace

import pytest

from ropecli.errors import OutputError
from ropecli.evaluate.protocols import PROTOCOLS
from ropecli.report.page import render_page, write_page
from ropecli.report.wording import PROTOCOLS_IN_WORDS
from ropecli.tune.record import Score


def parsed(page):
    return ET.fromstring(page)


def texts(tree, tag):
    return ["".join(element.itertext()) for element in tree.iter(tag)]


@pytest.fixture
def page(report, with_baseline, retrieval):
    yarn = replace(report(30.0, 31.0, 32.0), protocol="yarn")
    found = retrieval({(256, 0.0): 4, (256, 0.5): 3, (512, 0.0): 1})
    return parsed(render_page([with_baseline, report(19.0, 19.5, 30.0, method="linear", factor=4.0), yarn, found]))


def test_every_number_is_there(page, with_baseline):
    cells = Counter(texts(page, "td"))
    for row in (*with_baseline.rows, *with_baseline.baseline.rows):
        numbers = (f"{row.ppl:.2f}", f"{row.ppl_low:.2f} to {row.ppl_high:.2f}", f"{row.nll:.4f}", f"{row.tokens}")
        for number in (*numbers, f"{row.bits_per_byte:.4f}", f"{row.tokens_per_second:.0f}", "2.0 s", "3 MiB"):
            assert cells[number], number
    assert cells["4/4"] == cells["3/4"] == cells["1/4"] == 1
    assert cells["–"] >= 1


def test_headlines_protocols_and_facts_are_there(page, with_baseline):
    paragraphs = texts(page, "p")
    assert "short-context cost: +1.2% (0.3 to 2.0) at 256 tokens" in paragraphs
    assert "long-context gain: -7.2% (-11.4 to -3.7): 1024 tokens against the baseline's 256" in paragraphs
    assert PROTOCOLS_IN_WORDS["prefix"] in paragraphs
    assert PROTOCOLS_IN_WORDS["yarn"] in paragraphs
    facts = texts(page, "dd")
    for fact in (with_baseline.digest, with_baseline.fingerprint, "256 tokens", "passkey (generate)", "10%"):
        assert fact in facts
    assert any(with_baseline.environment["torch"] in fact for fact in facts)
    assert "ropecli eval-ppl extended --data demo" in texts(page, "code")
    # three of the prefix reports, two of the yarn one, a heat map
    assert len(list(page.iter("figure"))) == 6 == len(list(page.iter("{http://www.w3.org/2000/svg}svg")))


def test_nothing_is_fetched_and_nothing_runs(page):
    tags = {element.tag.rpartition("}")[2] for element in page.iter()}
    assert not tags & {"script", "link", "iframe", "object", "embed", "base", "form", "foreignObject"}
    for element in page.iter():
        for name, value in element.attrib.items():
            name = name.rpartition("}")[2]
            assert not name.startswith("on")
            if name in ("href", "src"):
                assert value.startswith(("#", "data:image/png;base64,"))
            assert "url(" not in value.replace("url(#", "")
    styles = " ".join(texts(page, "style"))
    assert not {"@import", "url("} & set(styles.split())
    assert "@media print" in styles
    assert "prefers-color-scheme: dark" in styles
    policy = next(one.get("content") for one in page.iter("meta") if one.get("http-equiv"))
    assert policy.startswith("default-src 'none'")


def test_no_id_is_there_twice_and_each_reference_has_its_own(page):
    ids = Counter(element.get("id") for element in page.iter() if element.get("id"))
    assert set(ids.values()) == {1}
    used = {value[1:] for one in page.iter() for name, value in one.attrib.items() if name.endswith("href")}
    assert {name for name in used if not name.startswith("ata:")} <= set(ids)


NAMES = [
    "<script>alert(1)</script>",
    "'\"><img src=x onerror=alert(1)>",
    "</title></style></svg><script>",
    "--><script>alert(1)</script><!--",
    "{{ 7 * 7 }}{% raw %}",
    "]]>&lt;",
    "$\\frac",
    "a\x00\x1b[31m\u202e",
]


@pytest.mark.parametrize("name", NAMES)
def test_no_name_is_markup(report, retrieval, name):
    hostile = {"checkpoint": name, "source": name}
    base = report(18.0, 25.0, 47.0, **hostile)
    one = replace(
        report(18.0, 25.0, 47.0, method=name, params={name: name}, **hostile),
        digest=name,
        fingerprint=name,
        dtype=name,
        device=name,
        command=["ropecli", name],
        environment={name: name},
        settings={name: name},
        baseline=base,
        document_names=[name] * 4,
    )
    found = replace(retrieval({(256, 0.0): 4}, **hostile), task=name, mode=name, settings={name: name})
    page = render_page([one, replace(base, checkpoint="other", digest="2"), found])
    tree = parsed(page)
    tags = {element.tag.rpartition("}")[2] for element in tree.iter()}
    assert not tags & {"script", "img"}
    assert not [name for element in tree.iter() for name in element.attrib if name.startswith("on")]
    if not set(name) & set("\x00\x1b"):
        assert page.count("alert(1)") == 0 or "<script" not in page
        assert name in texts(tree, "dd")
    assert "49" not in texts(tree, "h1")[0]


def test_it_is_read_the_same_by_a_browser(page, report):
    """A parser of HTML, that forgives, sees the elements that a strict one sees."""
    from html.parser import HTMLParser

    class Tags(HTMLParser):
        seen: list[str]

        def handle_starttag(self, tag, attrs):
            self.seen.append(tag)

    parser = Tags()
    parser.seen = []
    text = render_page([report(18.0, 25.0, 47.0, checkpoint=NAMES[0])])
    parser.feed(text)
    strict = [element.tag.rpartition("}")[2].lower() for element in parsed(text).iter()]
    assert parser.seen == strict


def test_different_data_bring_bits_per_byte(report):
    one = report(18.0, 25.0, 47.0)
    tree = parsed(render_page([one, replace(one, fingerprint="2" * 64)]))
    drawn = texts(tree, "{http://www.w3.org/2000/svg}text")
    assert "bits per byte (lower is better)" in drawn
    assert any("different data" in note for note in texts(tree, "p"))


def test_what_cannot_be_drawn_is_left_to_the_table(report):
    many = [report(18.0, 25.0, 47.0, method="linear", factor=2.0 + index) for index in range(160)]
    tree = parsed(render_page(many))
    assert not list(tree.iter("figure"))
    for kind in ("perplexity", "comparison", "context"):
        assert any(f"The plot of kind {kind} is left out: 160 lines" in note for note in texts(tree, "p"))


def test_two_points_of_loss_by_context_are_no_plot(report):
    one = report(18.0, 25.0, 47.0)
    rows = [replace(row, by_context=row.by_context[-2:]) for row in one.rows]
    tree = parsed(render_page([replace(one, protocol="tail", rows=rows)]))
    assert len(list(tree.iter("figure"))) == 1


def test_the_summary_of_retrieval_is_there(retrieval):
    found = retrieval({(256, 0.0): 4, (256, 0.999): 3, (256, 1.0): 0})
    found = replace(found, mode="rank", cells=[replace(cell, rank=2.5, margin=-1.5) for cell in found.cells])
    tree = parsed(render_page([found]))
    heads, cells = texts(tree, "th"), texts(tree, "td")
    assert {"mean rank", "margin (nats)", "95% (Wilson)", "0", "0.999", "1"} <= set(heads)
    assert cells[-7:] == ["256", "58%", "32 to 81%", "12", "2.5", "-1.50", "inside"]


def test_identical_pictures_have_ids_of_their_own(retrieval):
    found = [replace(retrieval({(256, 0.0): 4}), task=task) for task in ("passkey", "passkey", "needle")]
    tree = parsed(render_page(found))
    ids = Counter(element.get("id") for element in tree.iter() if element.get("id"))
    assert set(ids.values()) == {1}


def test_print_has_no_table_wider_than_its_paper(page):
    printed = " ".join(texts(page, "style")).partition("@media print")[2]
    assert "white-space: normal" in printed


def test_tunings_have_their_numbers_plots_and_facts(tuning):
    run = tuning("heads")
    tree = parsed(render_page([run]))
    assert texts(tree, "h1") == ["Tuning of demo"]
    assert texts(tree, "h2") == ["demo, yarn ×4: tuning (heads)"]
    rows = [["".join(cell.itertext()) for cell in row] for row in tree.iter("tr")]
    spent = sum(point.seconds for point in run.points if point.level == "grid")
    result = [f"{math.exp(value):.2f}" for value in (run.score.window, run.score.target)]
    assert rows == [
        ["model", "perplexity at 256", "at 1024", "documents", "numbers learned", "time"],
        ["as pretrained", "13.55", "47.03", "16", "–", "–"],
        ["yarn ×4, nothing tuned", "15.47", "14.91", "16", "–", "–"],
        ["yarn ×4, the best constants", "14.43", "14.31", "16", "0", f"{spent:.1f} s"],
        ["yarn ×4, tuned (heads, step 100)", *result, "16", "513", "2 min 07 s"],
    ]
    assert len(list(tree.iter("figure"))) == 3
    facts = texts(tree, "dd")
    for fact in (
        run.digest,
        run.fingerprint,
        "1024 tokens",
        f"{len(run.points)}",
        '{"beta_fast": 8.0, "beta_slow": 0.5}',
    ):
        assert fact in facts
    assert "ropecli 0.1, torch 2.9" in facts
    assert texts(tree, "code") == ["ropecli tune demo --level heads"]


def test_several_tunings_stand_side_by_side_first(tuning, report):
    runs = [tuning("grid", points=3), tuning("heads", layers=1), tuning("search", points=5)]
    tree = parsed(render_page([report(18.0, 25.0, 47.0), *runs]))
    assert texts(tree, "h1")[0].startswith("Evaluation of")
    assert texts(tree, "h2")[-4] == "Tuning runs side by side"
    rows = [["".join(cell.itertext()) for cell in row] for row in tree.iter("tr")]
    assert ["heads, yarn ×4, 129 numbers learned", "13.94", "13.24", "16", "129", "2 min 07 s"] in rows
    # of perplexity 2, of all runs 2, of each 2, and the gains of one
    assert len(list(tree.iter("figure"))) == 2 + 2 + 3 * 2 + 1
    assert not any("not of the same tokens" in note for note in texts(tree, "p"))
    other = parsed(render_page([runs[0], replace(runs[1], digest="4" * 64)]))
    assert any("not of the same tokens" in note for note in texts(other, "p"))
    ids = Counter(element.get("id") for element in tree.iter() if element.get("id"))
    assert set(ids.values()) == {1}


@pytest.mark.parametrize("name", ["".join(NAMES[:-1]), NAMES[-1]])
def test_no_name_of_a_tuning_is_markup(tuning, name):
    run = tuning(
        "heads", points=2, checkpoint=name, source=name, digest=name, fingerprint=name, dtype=name, device=name
    )
    run = replace(
        run,
        level=name,
        method=name,
        params={name: name},
        settings={"methods": [name], name: name},
        command=["ropecli", name],
        environment={name: name},
        points=[replace(point, level=name, method=name) for point in run.points],
        gains=[replace(layer, name=name) for layer in run.gains],
    )
    tree = parsed(render_page([run]))
    tags = {element.tag.rpartition("}")[2] for element in tree.iter()}
    assert not tags & {"script", "img"}
    assert not [name for element in tree.iter() for name in element.attrib if name.startswith("on")]
    if not set(name) & set("\x00\x1b"):
        assert name in texts(tree, "dd")


def test_a_tuning_that_overflowed_is_told_in_words(tuning):
    run = tuning("grid", points=3)
    lost = Score(math.inf, math.inf, math.inf, 0)
    tree = parsed(render_page([replace(run, plain=lost, pretrained_inv_freq=[0.0] * 16)]))
    rows = [["".join(cell.itertext()) for cell in row] for row in tree.iter("tr")]
    assert ["yarn ×4, nothing tuned", "overflowed", "overflowed", "0", "–", "–"] in rows
    assert any("The plot of kind tuned-frequencies is left out: No pair" in note for note in texts(tree, "p"))


def test_every_protocol_has_its_words():
    assert set(PROTOCOLS_IN_WORDS) == set(PROTOCOLS)


def test_the_file_is_whole_or_absent(report, tmp_path, monkeypatch):
    write_page(tmp_path / "new" / "page.html", [report(18.0, 25.0, 47.0)])
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["page.html"]
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        write_page(tmp_path / "file" / "page.html", [report(18.0, 25.0, 47.0)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "new"]
