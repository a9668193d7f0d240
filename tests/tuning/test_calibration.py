"""Calibration documents: parted, in an order of the seed, none of them on both sides."""

import pytest
import torch

from ropecli.data.sources import Source
from ropecli.errors import DataError
from ropecli.tuning.calibration import read_calibration

TARGET = 100


@pytest.fixture
def texts(tmp_path, corpus):
    """texts(parts, repeated=...) -> a folder of `parts` different documents, the first of them repeated."""

    def write(parts, repeated=0):
        words = " ".join(path.read_text() for path in sorted(corpus.iterdir())).split()
        folder = tmp_path / f"texts-{parts}-{repeated}"
        folder.mkdir()
        for index in range(parts + repeated):
            start = 150 * (index if index < parts else 0)
            # what is beyond the target differs, and is not read
            text = " ".join(words[start : start + 150]) + (" end" if index < parts else f" {words[index]} end")
            (folder / f"{index:03}.txt").write_text(text)
        return str(folder)

    return write


def ids_of(calibration):
    scored = [tuple(document.ids.tolist()) for document in calibration.evaluated.kept]
    return scored, [tuple(row) for row in calibration.sequences.tolist()]


@pytest.mark.parametrize(("parts", "count"), [(4, 2), (30, 7), (70, 16)])
def test_a_quarter_of_the_documents_up_to_sixteen_is_scored(texts, tokenizer, parts, count):
    calibration = read_calibration(Source(texts(parts)), tokenizer, TARGET, most=None, seed=0)
    scored, learned = ids_of(calibration)
    assert (len(scored), len(learned)) == (count, parts - count)
    assert calibration.sequences.dtype == torch.int64
    assert calibration.sequences.shape[1] == TARGET
    assert {len(ids) for ids in scored} == {TARGET}
    assert len({*scored, *learned}) == parts


def test_the_seed_determines_the_order(texts, tokenizer):
    folder = texts(16)
    first, same, other = (
        read_calibration(Source(folder), tokenizer, TARGET, most=None, seed=seed) for seed in (0, 0, 1)
    )
    assert ids_of(first) == ids_of(same) != ids_of(other)
    assert first.fingerprint() == same.fingerprint() != other.fingerprint()


def test_repeated_documents_count_once(texts, tokenizer):
    folder = texts(12, repeated=12)
    for seed in range(4):
        scored, learned = ids_of(read_calibration(Source(folder), tokenizer, TARGET, most=None, seed=seed))
        assert len(scored) + len(learned) == 12
        assert not set(scored) & set(learned)


def test_too_few_documents_are_an_error(texts, tokenizer):
    with pytest.raises(DataError, match="has too few distinct documents of 100 tokens: 3 of 8; expected at least 4"):
        read_calibration(Source(texts(3, repeated=5)), tokenizer, TARGET, most=None, seed=0)
    with pytest.raises(DataError, match="distinct documents of 100 tokens: 3 of 3;"):
        read_calibration(Source(texts(8)), tokenizer, TARGET, most=3, seed=0)


def test_the_held_out_text_is_refused(tokenizer):
    with pytest.raises(DataError, match="'demo' is the held-out text"):
        read_calibration(Source("demo"), tokenizer, TARGET, most=None, seed=0)
