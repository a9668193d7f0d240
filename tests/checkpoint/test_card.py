"""The section that patch, tune and finetune put into the README.md that they copy."""

import os

import pytest

from ropecli.checkpoint.card import hub_link, with_section, without_section

METADATA = b"---\nlicense: mit\ntags:\n- a\n---\n"
READMES = {
    "metadata": METADATA + b"# Title\n\nNotice.\n",
    "text only": b"# Title\n\n---\nno: metadata\n---\n",
    "windows": METADATA.replace(b"\n", b"\r\n") + b"\r\n# Title\r\n",
    "byte order mark": b"\xef\xbb\xbf" + METADATA + b"# Title\n",
    "not utf-8": METADATA + b"# Caf\xe9\n",
    "empty": b"",
    "markers without an end": b"<!-- ropecli:begin -->" * 40_000,
}


@pytest.mark.parametrize("readme", READMES.values(), ids=READMES)
def test_the_section_is_placed_after_the_metadata_and_removed_again(readme):
    once = with_section(readme, "## New\n\ntext")
    assert without_section(once) == readme
    assert with_section(once, "## Newer") == with_section(readme, "## Newer")
    before, _, after = once.partition(b"\n<!-- ropecli:begin -->\n\n## New\n\ntext\n\n<!-- ropecli:end -->\n")
    assert before + after == readme
    assert before.rstrip().endswith(b"---") == (b"license" in readme)


def test_a_link_to_the_hub_leads_nowhere_else():
    assert hub_link("owner/tiny", "v1) [free](https://evil.example") == (
        "[owner/tiny](https://huggingface.co/owner/tiny/tree/v1%29%20%5Bfree%5D%28https%3A//evil.example)"
    )


@pytest.fixture
def source(llama, tmp_path):
    """A checkpoint with a README.md that is a hard link."""
    import shutil

    folder = shutil.copytree(llama, tmp_path / "source")
    (tmp_path / "card.md").write_bytes(READMES["metadata"])
    os.link(tmp_path / "card.md", folder / "README.md")
    return folder


def test_a_patch_describes_itself_and_a_revert_removes_that(source, ropecli, tmp_path):
    def patch(before, after, *options):
        assert ropecli("patch", before, *options, "-o", tmp_path / after).code == 0
        return (tmp_path / after / "README.md").read_bytes()

    once = patch(source, "once", "--method", "yarn", "--factor", 4, "--no-verify")
    assert once.startswith(METADATA)
    assert b"## Context length: 256 tokens" in once
    assert b"with yarn \xc3\x974 (Peng et al. 2023" in once
    twice = patch(tmp_path / "once", "twice", "--method", "linear", "--factor", 2, "--no-verify")
    assert twice.count(b"<!-- ropecli:begin -->") == 1
    assert b"with linear" in twice
    assert patch(tmp_path / "twice", "reverted", "--revert") == READMES["metadata"]
    assert (source / "README.md").read_bytes() == READMES["metadata"]  # not written through a link


def test_the_section_describes_tuning(source, tmp_path):
    from ropecli.attention.patching import patch_to
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.checkpoint.patch_plan import make_plan
    from ropecli.scaling.spec import make_spec

    tuned = {"level": "heads", "data": "books", "points": 24, "steps": 40, "learned": 65, "weights_changed": True}
    plan = make_plan(open_checkpoint(source), make_spec("yarn", 4.0))
    patch_to(plan, tmp_path / "tuned", verify=False, notes={"tuned": tuned})
    text = (tmp_path / "tuned" / "README.md").read_text()
    assert "chose these constants from 24 measurements and trained 65 parameters in 40 steps, on `books`." in text
    assert "The weights are unchanged" not in text
    assert "ropecli patch" not in text  # it would not write these weights
