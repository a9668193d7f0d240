"""What a report may not hold though its values are of the right types: it could not be drawn, or would mislead."""

import math
from itertools import pairwise

from ropecli.errors import shown
from ropecli.evaluate.protocols import PROTOCOLS
from ropecli.evaluate.report import Cell, EvalReport, RetrievalReport
from ropecli.evaluate.tally import Row

MOST = 10_000
"""Rows, cells or reports."""
_LONGEST = 10**12
"""Tokens; more is no length that any model reads, and numbers much beyond it cannot be drawn."""
_LEAST = 0.99
"""A perplexity; one of 1 may be a little less for rounding."""


def faults_of_perplexity(report: EvalReport, what: str = "") -> list[str]:
    """what: before each fault, as 'baseline: '. In words, in the report's order."""
    faults = [] if report.protocol in PROTOCOLS else [f"protocol {shown(report.protocol)} is not known"]
    faults += _faults_of_measured(report)
    lengths = [row.length for row in report.rows]
    if not lengths or len(lengths) > MOST:
        faults.append(f"it has {len(lengths)} rows; 1 to {MOST} were expected")
    if sorted(set(lengths)) != lengths:
        faults.append("the rows are not by ascending length")
    for row in report.rows:
        faults += [f"length {shown(row.length)}: {fault}" for fault in _faults_of_row(row)]
    for headline in report.headlines:
        if not (_is_length(headline.length) and _is_length(headline.baseline_length)):
            faults.append(f"headline {shown(headline.name)} is at no length")
        elif (headline.change.low is None) != (headline.change.high is None):
            faults.append(f"headline {shown(headline.name)} has half an interval")
    if report.baseline is not None:
        if what:
            faults.append("it has a baseline of its own")
        elif report.baseline.protocol != report.protocol:
            faults.append("the baseline is of another protocol")
        else:
            faults += faults_of_perplexity(report.baseline, "baseline: ")
    return [f"{what}{fault}" for fault in faults]


def _faults_of_row(row: Row) -> list[str]:
    interval = (row.ppl_low, row.ppl_high)
    checks = {
        "the length is no number of tokens": _is_length(row.length),
        "perplexity must be at least 1": row.ppl >= _LEAST,
        "ppl must be exp(nll)": row.ppl <= 0 or abs(math.log(row.ppl) - row.nll) <= 1e-6,
        "the interval must have two ends, or none": interval == (None, None)
        or (None not in interval and _LEAST / 2 <= interval[0] <= interval[1]),  # type: ignore[operator]
        "bits_per_byte must not be negative": row.bits_per_byte is None or row.bits_per_byte >= 0,
        "tokens and documents must be above 0": 0 < row.tokens < _LONGEST**2 and 0 < row.documents < _LONGEST,
        "document_nll and document_weights must hold a number a document": len(row.document_nll)
        == len(row.document_weights)
        == row.documents,
        "by_context must ascend": _ascend(row),
        "seconds, tokens_per_second and peak_memory must not be negative": row.seconds >= 0
        and row.tokens_per_second >= 0
        and 0 <= row.peak_memory < 2**80,
    }
    return [fault for fault, passed in checks.items() if not passed]


def _ascend(row: Row) -> bool:
    edges = [edge for bucket in row.by_context for edge in (bucket.start, bucket.stop - 1)]
    return all(low <= high for low, high in pairwise(edges)) and all(
        0 < bucket.start < bucket.stop <= _LONGEST and bucket.tokens > 0 for bucket in row.by_context
    )


def faults_of_retrieval(report: RetrievalReport) -> list[str]:
    faults = _faults_of_measured(report)
    places = [(cell.length, cell.depth) for cell in report.cells]
    if report.mode not in ("rank", "generate"):
        faults.append(f"mode {shown(report.mode)} is not known; rank or generate was expected")
    if not places or len(places) > MOST:
        faults.append(f"it has {len(places)} cells; 1 to {MOST} were expected")
    if len(set(places)) < len(places):
        faults.append("two cells are of the same length and depth")
    if not 0 <= report.chance <= 1:
        faults.append("chance must be from 0 to 1")
    for cell in report.cells:
        if not _can_be(cell):
            faults.append(f"the cell at length {shown(cell.length)} and depth {cell.depth:g} cannot be")
    return faults


def _can_be(cell: Cell) -> bool:
    at_a_place = _is_length(cell.length) and 0 <= cell.depth <= 1
    counted = 0 <= cell.hits <= cell.trials and cell.trials > 0 and (cell.rank is None or cell.rank >= 1)
    return at_a_place and counted and (not cell.found or (len(cell.found), sum(cell.found)) == (cell.trials, cell.hits))


def _faults_of_measured(report: EvalReport | RetrievalReport) -> list[str]:
    faults = [] if report.factor > 0 else ["factor must be above 0"]
    if not _is_length(report.original_max_position_embeddings):
        faults.append("original_max_position_embeddings is no number of tokens")
    return faults


def _is_length(value: int) -> bool:
    return 0 < value <= _LONGEST
