"""The figures in analysis/README.md are those of `ropecli theory`."""

import json
import re
from pathlib import Path

import pytest
from tiny_settings import LLAMA_2_7B

PAGE = (Path(__file__).parent.parent / "ropecli" / "analysis" / "README.md").read_text(encoding="utf-8")
SECTION = " ".join(PAGE.split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("geometry") / "Llama-2-7B"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(LLAMA_2_7B))
    return path


@pytest.fixture
def theory(ropecli, folder):
    options = re.search(r"with `(--methods \S*abf\S* --set abf.beta=50)`", SECTION).group(1).split()
    return json.loads(ropecli("theory", folder, *options, "--factor", "8", "--json").out)


def never_seen(rope: dict, pretrained: dict) -> int:
    """Pairs without a full rotation in pretraining that rotate further at the target than they did there."""
    pairs = zip(pretrained["rotations_in_pretraining_length"], rope["rotations_in_target_length"], strict=True)
    return sum(before < 1 and after > before * (1 + 1e-9) for before, after in pairs)


def test_the_table_is_what_the_command_says(theory):
    rows = re.findall(r"^\| (`\w+`.*|pretrained.*) \|$", PAGE, re.MULTILINE)
    pretrained = theory["ropes"][0]
    slow = sum(turns < 1 for turns in pretrained["rotations_in_pretraining_length"])
    assert len(rows) == len(theory["ropes"])
    for row, rope in zip(rows, theory["ropes"], strict=True):
        name, pairs, *numbers = (cell.strip() for cell in row.split("|"))
        assert rope["method"] in (name.split("`")[1] if "`" in name else "none")
        assert pairs.split(" of ") == [str(never_seen(rope, pretrained)), str(slow)][: 1 + (" of " in pairs)]
        keys = ("granularity", "closest_images", "distance_to_old_images", "first_negative_score")
        for key, shown in zip(keys, numbers, strict=True):
            digits = len(shown.partition(".")[2])
            assert f"{rope[key]:,.{digits}f}" == shown, (name, key)


def test_the_sentences_are_too(theory, ropecli, folder):
    assert f"critical dimension {theory['ropes'][0]['critical_dimension']}" in SECTION
    assert f"supports {theory['supported_length']:,} tokens" in SECTION
    assert f"32,768 need {int(theory['smallest_base']):,}" in SECTION
    own = json.loads(ropecli("theory", folder, "--json").out)
    assert f"4,096 tokens need a base of at least {int(own['smallest_base']):,}" in SECTION
    rerope = json.loads(ropecli("theory", folder, "--methods", "rerope", "--factor", "8", "--json").out)
    assert f"at most {rerope['ropes'][1]['largest_distance']:,} here" in SECTION
