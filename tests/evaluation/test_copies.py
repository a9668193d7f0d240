"""Copies in the text itself: classes by the context, and a perplexity split by them."""

import json

import numpy as np
import pytest

from ropecli.evaluation.copies import CLASSES, classes_of
from ropecli.evaluation.driver import score_samples
from ropecli.evaluation.protocols import Protocol
from ropecli.evaluation.readers.live import LiveReader
from ropecli.evaluation.tasks.perplexity import Perplexity


def test_the_classes_of_a_hand_made_text():
    ids, starts = np.array([*map(ord, "abcdXfghijklabcdXmnabcdYl")]), np.zeros(25, dtype=int)
    names = np.array([*"-nNfF"])  # upper case: another token follows

    def classes(reference, starts=starts):
        return "".join(names[classes_of(ids, starts, reference)])

    assert classes(12) == "-" * 16 + "fF" + "-" * 5 + "N-"
    assert classes(40) == "-" * 16 + "nN" + "-" * 5 + "N-"
    assert classes(6) == "-" * 16 + "fF" + "-" * 5 + "F-"
    assert classes(12, np.where(np.arange(25) == 16, 1, 0)) == "-" * 17 + "F" + "-" * 5 + "N-"  # read no more


def by_loop(ids, reader, reference):
    """Class of each token; reader: tokens that it has before each."""
    classes = []
    for token in range(len(ids)):
        begins = [at for at in range(token - 4) if token >= 4 and (ids[at : at + 4] == ids[token - 4 : token]).all()]
        begins = [at for at in begins[-1:] if at >= token - reader[token]]
        number = 0
        for at in begins:
            number = 1 + 2 * (token - at >= reference) + (ids[at + 4] != ids[token])
        classes.append(number)
    return np.array(classes)


@pytest.mark.parametrize("name", ["prefix", "tail", "sliding"])
def test_a_split_perplexity_is_that_of_a_loop(build, loaded, uneven, plain_nll, name):
    model = loaded(build("llama", head_dim=32, max_position_embeddings=256))
    documents = uneven(200, 215, 230)
    random = np.random.default_rng(0)
    for document in documents.kept:  # few different tokens: they repeat
        document.ids[1:] = random.integers(3, 6, len(document.ids) - 1)
    task = Perplexity(documents, [64, 192], Protocol(name, targets=40 if name == "tail" else None), "", 64)
    plain = Perplexity(documents, [64, 192], Protocol(name, targets=40 if name == "tail" else None))
    cells = task.cells(score_samples(task, LiveReader(model)))
    for cell, unsplit in zip(cells, plain.cells(score_samples(plain, LiveReader(model))), strict=True):
        assert (cell.sums, cell.weights, unsplit.by_class) == (unsplit.sums, unsplit.weights, ())
        sums = {part: np.zeros(3) for part in CLASSES}
        counts = {part: np.zeros(3) for part in CLASSES}
        for number, document in enumerate(documents.kept):
            size = len(document.ids) if name == "sliding" else 192
            reader, losses, scored = np.arange(size), np.zeros(size), np.zeros(size, dtype=bool)
            for length in (192, cell.length):  # the reader's context is that of the longest
                for window in task.protocol.windows(document, documents.special, length, 192):
                    at = np.arange(window.stop - window.targets, window.stop)
                    begin = window.stop - len(window.ids)
                    if length == 192:
                        reader[at] = at - (begin + 1 if begin else 0)  # <s> replaces the first
                    if length == cell.length:
                        losses[at], scored[at] = plain_nll(model, window.ids.tolist())[-window.targets :], True
            classes = by_loop(document.ids[:size], reader, 64)
            for part, numbers in CLASSES.items():
                members = np.isin(classes, numbers) & scored
                sums[part][number], counts[part][number] = losses[members].sum(), members.sum()
        for part in cell.by_class:
            assert part.sums == pytest.approx(sums[part.task], abs=1e-2)
            assert part.weights == tuple(counts[part.task])
        assert {part.task for part in cell.by_class} == {part for part, count in counts.items() if count.sum()}


def test_the_split_is_told(ropecli, tmp_path):
    path = tmp_path / "report.json"
    options = ["--data", "demo", "--protocol", "tail", "--lengths", "256,1024", "--factors", 4, "--max-documents", 4]
    outcome = ropecli("compare", "demo", *options, "--methods", "none,yarn,streaming", "--output", path).succeeds()
    assert "of the scored tokens follow four tokens that stood last more than 256 tokens back, in" in outcome.printed
    base, *_ = json.loads(path.read_text())["reports"]
    assert [part["task"] for part in base["cells"][0]["by_class"]] == [*CLASSES]
    ropecli("report", path, "--output", tmp_path / "page.html").succeeds()
    assert "loss by what the text repeats, at 1024 tokens" in (tmp_path / "page.html").read_text()
