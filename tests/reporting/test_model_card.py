"""The card of `ropecli push`: its numbers are those of the reports, its words those of ropecli.yaml."""

import json
from dataclasses import replace

import pytest
import yaml
from huggingface_hub import ModelCard

from ropecli.checkpoint.identity import identity_of
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.checkpoint.state import read_state
from ropecli.errors import CheckpointError
from ropecli.evaluation.report import ARMS, Reference
from ropecli.reporting.model_card import make_card, read_measurements

REPO = "me/model-256"
BASE = "owner/base"


@pytest.fixture
def folder(patched, llama):
    return patched(llama, "yarn")


@pytest.fixture
def of(folder):
    """of(report, ...) -> the report as one of the folder."""

    def make(report, **others):
        return replace(report, checkpoint=str(folder), **identity_of(open_checkpoint(folder))._asdict() | others)

    return make


@pytest.fixture
def card(folder):
    """card(report file, ..., base=...) -> the card of the folder."""

    def make(*files, base=None):
        checkpoint = open_checkpoint(folder)
        made = make_card(read_state(checkpoint), REPO, read_measurements(files, checkpoint), base)
        return ModelCard(made.content)  # as it is read from the Hub

    return make


def rows_of(card, title):
    """The cells of the table whose title has these words."""
    _, _, below = card.text.partition(title)
    lines = below.partition("\n### ")[0].partition("\n## ")[0].replace("*", "").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("|")]
    return cells[2:]


def test_the_perplexities_are_those_of_the_report(card, of, with_baseline, written):
    base, report = with_baseline[0], of(with_baseline[1])
    made = card(written([base, report]))
    rows = rows_of(made, f"### {REPO}: perplexity by length, protocol tail")
    assert [[float(cell) for cell in row[:2]] for row in rows] == [
        [cell.length, pytest.approx(cell.ppl)] for cell in report.cells
    ]
    compared = rows_of(made, "2 checkpoints: perplexity by length, protocol tail")
    assert [row[1:] for row in compared] == [[f"{cell.ppl:.2f}" for cell in one.cells] for one in (base, report)]
    assert "from the base at 256 tokens." in made.text
    assert all(f"{name} {version}" in made.text for name, version in report.environment.items())


def test_a_comparison_shows_its_other_checkpoints_without_their_paths(card, of, report, written):
    extended = of(report(20.0, 19.0, 18.5, method="yarn", factor=4.0))
    other = report(18.0, 25.0, 47.0, checkpoint="/home/someone/base")
    cells = [replace(other.cells[0], task=arm, low=None, high=None) for arm in ARMS]
    near = replace(cells[2], sums=(1.0,) * 4)
    reference = Reference("/home/someone/base", *other.identity, cells[0], near)
    recall = of(report(9.0, 9.0, 9.0, task="recall", cells=cells, reference=reference))
    made = card(written([other, extended, recall]))
    assert "at 256 tokens in base. 0" in made.text
    rows = {row[0]: row for row in rows_of(made, "2 checkpoints: perplexity by length")}
    assert rows[f"{REPO} (yarn ×4)"][-3:] == ["20.00", "19.00", "18.50"]
    assert rows["base (base)"][-3:] == ["18.00", "25.00", "47.00"]
    assert "/home" not in made.text


def test_metadata_of_the_base_model_alone_are_dropped(card, folder):
    before = {
        "language": "no",
        "license": "other",
        "license_name": "community",
        "tags": ["chat", "rope"],
        "base_model": "owner/older",
        "base_model_relation": "quantized",
        "new_version": "owner/newer",
    }
    (folder / "README.md").write_bytes(f"---\r\n{yaml.safe_dump(before)}---\r\n# Title\r\n".encode())
    made = card(base=BASE)
    assert made.data.to_dict() == {
        "language": "no",
        "license": "other",
        "license_name": "community",
        "tags": ["chat", "rope", "long-context", "yarn", "ropecli"],
        "base_model": "owner/base",
        "library_name": "transformers",
    }
    assert made.text.endswith("-->\n\n# Title\n")
    assert "Base model: [owner/base](https://huggingface.co/owner/base)." in made.text
    (folder / "README.md").write_text("---\n- no mapping\n---\n")
    with pytest.raises(CheckpointError, match="expected a mapping"):
        card()


def test_trained_weights_are_a_finetune(card, folder):
    from ropecli.training.recipe_schema import make_recipe

    recipe = make_recipe(None, {"data": "/home/someone/books", "steps": 7, "length": 256, "adapter": "lora"})
    run = {"source": {}, "length": 256, "processes": 2, "recipe": recipe.record()}
    record = yaml.safe_load((folder / "ropecli.yaml").read_text())
    (folder / "ropecli.yaml").write_text(yaml.safe_dump({**record, "finetuned": run}))
    made = card(base=BASE)
    assert made.data["base_model_relation"] == "finetune"
    assert "trained it for 7 steps of 8 sequences of 256 tokens from `books`: learning rate 2e-05" in made.text
    assert "The weights are unchanged" not in made.text
    assert "/home" not in made.text


def test_a_link_to_the_hub_leads_nowhere_else(card, folder):
    source = {"checkpoint": "owner/tiny", "commit": "v1) [free](https://evil.example"}
    record = yaml.safe_load((folder / "ropecli.yaml").read_text())
    (folder / "ropecli.yaml").write_text(yaml.safe_dump({**record, "source": source}))
    link = "[owner/tiny](https://huggingface.co/owner/tiny/tree/v1%29%20%5Bfree%5D%28https%3A//evil.example)"
    assert f"patched {link} with yarn" in card().text


METADATA = "---\nlicense: mit\ntags:\n- a\n---\n"
READMES = {
    "metadata": (METADATA, "# Title\n\nNotice."),
    "text only": ("", "# Title\n\n---\nno: metadata\n---"),
    "markers without an end": ("", "<!-- ropecli:begin -->" * 40_000),
}


@pytest.mark.parametrize(("metadata", "text"), READMES.values(), ids=READMES)
def test_the_section_stands_between_metadata_and_text(metadata, text, card, folder):
    (folder / "README.md").write_bytes(f"{metadata}{text}\n".encode())
    made = card()
    assert made.data.get("license") == ("mit" if metadata else None)
    assert made.text.startswith("\n<!-- ropecli:begin -->\n\n# model-256\n")
    assert made.text.endswith(f"\n<!-- ropecli:end -->\n\n{text}\n")


def test_a_distance_method_needs_its_import_and_no_engine(patched, llama):
    folder = patched(llama, "rerope", window=32)
    text = make_card(read_state(open_checkpoint(folder)), REPO).content
    assert text.index("import ropecli.attention\nfrom transformers import") > 0
    assert "ropecli export" not in text
    assert "Other engines would run standard attention" in text


def test_names_cannot_end_the_section_or_a_table(card, of, report, written, folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["X\nimport os"]}))
    made = card(written(of(report(20.0, 19.0, 18.5, source="a|b <!-- ropecli:end --> `c`\n# d"))))
    assert made.content.count("<!-- ropecli:end -->") == 1
    assert "\n# d" not in made.text
    assert "import os" not in made.text
