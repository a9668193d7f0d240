"""Perplexity at several lengths by a named protocol.

`prefix`: the first N tokens of each document, each token after the first scored with all before it. All
lengths come from one pass where the rotary tables do not switch with the length. Early tokens have little
context, so this flatters long windows, and shows a collapse plainly.

`tail`: the same target tokens for every N, the last ones of each document's longest prefix, read with the
N - 1 to N - targets tokens before them: whether more context helps. Every window begins with the special tokens
that the tokenizer puts before a text.

ppl = exp(Σ nll / Σ tokens) over all scored tokens, natural logarithm.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ropecli.checkpoint.live import reset_tables, rotary_tables, switches_with_length
from ropecli.data.documents import Document, Documents
from ropecli.errors import DataError, RopecliError
from ropecli.evaluate.scoring import TokenScorer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROTOCOLS = ("prefix", "tail")
_RESAMPLES = 1000
_LARGEST_NLL = 700.0
"""exp of more overflows a float64."""


@dataclass(frozen=True)
class Row:
    """Perplexity at one length. nll: mean, nats.

    ppl_low, ppl_high: 95% bootstrap interval over documents; None for a single one, which tells of no spread.
    document_nll: shape (documents,), the sum over each document's scored tokens, for paired comparisons.
    """

    length: int
    ppl: float
    nll: float
    ppl_low: float | None
    ppl_high: float | None
    tokens: int
    documents: int
    document_nll: tuple[float, ...]


def evaluate_perplexity(
    model: "PreTrainedModel",
    documents: Documents,
    lengths: Sequence[int],
    *,
    protocol: str = "prefix",
    targets: int | None = None,
    switching: bool = False,
    advance: Callable[[], None] = lambda: None,
) -> list[Row]:
    """One Row per length, over documents that all have at least max(lengths) tokens.

    targets: tokens scored per document by `tail`; half the shortest length unless given. switching: whether the
    model was patched in memory so that its frequencies follow the length, and each length needs a pass of its
    own; found for itself where the model's own tables do so. advance: called after each forward pass; see
    `count_passes`. Raises DataError for lengths and targets that do not fit, RopecliError for a loss that is not
    finite.
    """
    lengths = sorted(set(lengths))
    _check_request(model, documents, lengths, protocol, targets)
    targets = targets or lengths[0] // 2
    make_fresh = fresh_tables_if_switching(model, lengths[-1])
    score = TokenScorer(model)
    device = model.device
    sums = np.zeros((len(lengths), len(documents.kept)))
    one_pass = protocol == "prefix" and not (switching or make_fresh)
    for index, length in enumerate(lengths):
        if one_pass and length != lengths[-1]:
            continue
        for column, document in enumerate(documents.kept):
            if make_fresh:
                make_fresh()
            ids = _window(document, documents.prefix, length, lengths[-1], protocol)
            nll = score(ids.to(device))[0].double().cpu().numpy()
            advance()
            if one_pass:
                sums[:, column] = np.cumsum(nll)[np.array(lengths) - 2]
            else:
                sums[index, column] = (nll if protocol == "prefix" else nll[-targets:]).sum()
    scored = [length - 1 if protocol == "prefix" else targets for length in lengths]
    return [_summarise(*row) for row in zip(lengths, sums, scored, strict=True)]


def fresh_tables_if_switching(model: "PreTrainedModel", longest: int) -> Callable[[], None] | None:
    """For models whose own rotary tables depend on the length, and remember it: a reset for before each pass."""
    tables = rotary_tables(model)
    return (lambda: reset_tables(tables)) if switches_with_length(tables, longest) else None


def count_passes(lengths: Sequence[int], documents: int, protocol: str, switching: bool) -> int:
    return documents * (1 if protocol == "prefix" and not switching else len(set(lengths)))


def _window(document: Document, prefix: tuple[int, ...], length: int, longest: int, protocol: str) -> torch.Tensor:
    start = 0 if protocol == "prefix" else longest - length
    ids = document.ids[start : start + length].copy()
    # models lean on their <s>: without it in every window, more context and an <s> could not be told apart
    ids[: len(prefix)] = prefix
    return torch.from_numpy(ids)[None]


def _check_request(
    model: "PreTrainedModel", documents: Documents, lengths: list[int], protocol: str, targets: int | None
) -> None:
    if protocol not in PROTOCOLS:
        raise DataError(f"Unknown protocol {protocol!r}. Known: {', '.join(PROTOCOLS)}.")
    if not lengths or lengths[0] < 2:
        raise DataError(f"The lengths are {lengths}; each must be at least 2 tokens, one to read and one to score.")
    if targets is not None and protocol != "tail":
        raise DataError(f"targets is for the protocol tail; {protocol} scores every token.")
    if targets is not None and not 0 < targets < lengths[0]:
        raise DataError(f"{targets} target tokens do not fit: the shortest length, {lengths[0]}, must exceed them.")
    shortest = min(len(document.ids) for document in documents.kept)
    if shortest < lengths[-1]:
        raise DataError(f"A document has {shortest} tokens, and the longest length is {lengths[-1]}.")
    vocabulary = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[arg-type, union-attr, index]
    largest = max(int(document.ids[: lengths[-1]].max()) for document in documents.kept)
    if largest >= vocabulary:
        raise DataError(f"The tokenizer gives id {largest}; the model knows ids below {vocabulary}. They do not match.")


def _summarise(length: int, document_nll: np.ndarray, scored: int) -> Row:
    if not np.isfinite(document_nll).all():
        bad = int(np.flatnonzero(~np.isfinite(document_nll))[0])
        raise RopecliError(f"The loss is not finite at length {length}, document {bad}: the model overflows there.")
    documents = len(document_nll)
    low, high = _interval(document_nll / scored) if documents > 1 else (None, None)
    # the same number of tokens is scored in every document, so that means of documents are token-weighted
    nll = float(document_nll.mean()) / scored
    if nll > _LARGEST_NLL:
        raise RopecliError(
            f"The mean loss at length {length} is {nll:.4g} nats: its exponential is beyond all numbers."
        )
    return Row(
        length=length,
        ppl=math.exp(nll),
        nll=nll,
        ppl_low=low,
        ppl_high=high,
        tokens=scored * documents,
        documents=documents,
        document_nll=tuple(document_nll.tolist()),
    )


def _interval(document_means: np.ndarray) -> tuple[float, float]:
    """95% bootstrap interval of the perplexity, documents resampled."""
    documents = len(document_means)
    picks = np.random.default_rng(0).integers(0, documents, (_RESAMPLES, documents))
    with np.errstate(over="ignore"):
        low, high = np.exp(np.quantile(document_means[picks].mean(axis=1), (0.025, 0.975)))
    return float(low), float(high)
