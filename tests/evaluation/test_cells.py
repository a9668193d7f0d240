"""From losses to cells and their intervals: by hand, by plain loops, and over all resamples there are."""

import math
from dataclasses import replace

import numpy as np
import pytest

from ropecli.data.documents import Document, Documents
from ropecli.errors import RopecliError
from ropecli.evaluation.report import loss_change
from ropecli.evaluation.tasks.perplexity import Perplexity


def tally_of(*windows, scored_bytes=7):
    sums = {"nll": sum(map(sum, windows)), "tokens": sum(map(len, windows))}
    return {**sums, "bytes": scored_bytes * len(windows)}


def summarise(*tallies, protocol="prefix"):
    """The cell of 512 tokens that documents with these tallies give."""
    documents = [Document(name, np.arange(512)) for name, _ in zip("abcd", tallies, strict=False)]
    task = Perplexity(Documents(tuple(documents), 0), [512], protocol)
    (cell,) = task.cells({(512, index): {"512": tally} for index, tally in enumerate(tallies)})
    return cell


def cell_of(sums, weights):
    """A cell with these documents."""
    return summarise(*(tally_of([total / weight] * weight) for total, weight in zip(sums, weights, strict=True)))


def test_a_cell_by_hand():
    cell = summarise(tally_of([1.0, 2.0], [3.0]), tally_of([4.0, 0.5]))
    assert cell.value == 10.5 / 5
    assert cell.ppl == math.exp(10.5 / 5)
    assert (cell.length, cell.tokens, cell.samples) == (512, 5, 2)
    assert (cell.sums, cell.weights) == ((6.0, 4.5), (3.0, 2.0))
    assert cell.bits_per_byte == pytest.approx(10.5 / math.log(2) / 21)


def test_a_loss_that_is_not_finite_names_its_document():
    tallies = [tally_of([1.0]), tally_of([1.0, float("nan")]), tally_of([float("inf")])]
    with pytest.raises(RopecliError, match=r"not finite, or above 700 nats, at length 512 in b and 1 more"):
        summarise(*tallies)


SUMS, WEIGHTS = [30.0, 22.0, 45.0, 28.0], [10, 12, 15, 8]


def all_resamples(sums, weights):
    """All ways to draw four documents from four, exp(Σ sums / Σ weights); shape (256,)."""
    picks = np.array(np.meshgrid(*[np.arange(4)] * 4)).reshape(4, -1)
    return np.exp(np.array(sums)[picks].sum(axis=0) / np.array(weights)[picks].sum(axis=0))


def assert_interval(low, high, resamples):
    """A thousand random ones instead of all; widened by Student's t of four documents."""
    logs = np.log(resamples)
    centre, wider = logs.mean(), (4 / 3) ** 0.5 * 3.1824 / 1.96
    expected = np.exp(centre + wider * (np.quantile(logs, (0.025, 0.975)) - centre))
    assert np.abs(np.array([low, high]) - expected).max() < 0.1 * (expected[1] - expected[0])


def test_the_interval_resamples_documents_with_their_weights():
    cell = cell_of(SUMS, WEIGHTS)
    assert_interval(cell.low, cell.high, all_resamples(SUMS, WEIGHTS))
    unweighted = np.quantile(all_resamples(np.array(SUMS) / WEIGHTS, [1] * 4), (0.025, 0.975))
    assert abs(unweighted - [cell.low, cell.high]).max() > 0.5  # guards the line before


def test_a_loss_change_is_over_the_same_resamples():
    base = cell_of(SUMS, WEIGHTS)
    sums = [31.0, 25.0, 44.0, 31.0]
    change = loss_change(cell_of(sums, WEIGHTS), base)
    assert change.change == pytest.approx(math.exp((sum(sums) - sum(SUMS)) / sum(WEIGHTS)) - 1)
    difference = np.array(sums) - SUMS
    assert_interval(change.low + 1, change.high + 1, all_resamples(difference, WEIGHTS))


def test_a_single_document_has_no_interval():
    cell = cell_of([31.0], [10])
    change = loss_change(cell, cell_of([30.0], [10]))
    assert (cell.low, cell.high, change.low, change.high) == (None, None, None, None)
    assert change.change == pytest.approx(math.expm1(0.1))


def test_cells_of_other_tokens_are_not_paired():
    base = cell_of(SUMS, WEIGHTS)
    with pytest.raises(RopecliError, match="different tokens"):
        loss_change(replace(base, weights=(10.0, 12.0, 15.0, 9.0)), base)
