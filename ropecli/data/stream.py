"""Training sequences of one length from all sources of a recipe, as a function of the stream position."""

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ropecli.data.documents import none_long_enough, special_tokens
from ropecli.data.sampling import (
    Mixture,
    Selection,
    positions_of,
    refuse_impossible_positions,
    seeded_generator,
    select_documents,
)
from ropecli.data.sequences import (
    SHORTEST,
    UNSCORED,
    SequenceLayout,
    SourceSequences,
    TrainingSequence,
    concatenate,
    cut_long,
    pack,
)
from ropecli.data.sources import TO_TRAIN, Source
from ropecli.data.token_store import TokenStore, open_store
from ropecli.errors import DataError

_FORMAT = 1
"""Version of the fingerprint. Runs with another one cannot be resumed."""


@dataclass(frozen=True)
class Batch:
    """ids, labels: shape (sequences, length), int64. labels[i, t] is the token after ids[i, t], -100 if not scored.

    positions: the same shape, or None for 0, 1, 2 ... in every row. packed: positions restart at each document.
    document_labels: the same shape, the number of scored labels of the document that a label belongs to, in all of the
    document's pieces; None if every label has the same weight.
    """

    ids: np.ndarray
    labels: np.ndarray
    positions: np.ndarray | None = None
    packed: bool = False
    document_labels: np.ndarray | None = None

    @property
    def weight(self) -> float:
        """Sum of the weights of all scored labels: their number, or the number of documents that they make up."""
        scored = self.labels != UNSCORED
        return float(scored.sum() if self.document_labels is None else (1 / self.document_labels[scored]).sum())


class Stream:
    """Training sequences of one length, by position. packed: whether positions restart in any of them.

    recipe: see training/recipe_schema.py.
    """

    def __init__(
        self,
        recipe: Any,
        length: int,
        context_length: int,
        parts: Sequence[SourceSequences],
        made_of: Sequence[object],
    ) -> None:
        self.length = length
        self.packed = any(source.sequences == "packed" for source in recipe.sources)
        self._recipe, self._context_length, self._parts, self._made_of = recipe, context_length, parts, made_of
        self._mixture = Mixture([source.weight for source in recipe.sources], recipe.seed)

    def __len__(self) -> int:
        """Number of distinct sequences of all sources."""
        return sum(len(part) for part in self._parts)

    @property
    def largest_id(self) -> int:
        """Largest token id of all sources."""
        return max(part.largest_id for part in self._parts)

    def batch(self, positions: range) -> Batch:
        """The sequences at these positions of the infinite stream."""
        rows = [self._row(position) for position in positions]
        gaps = self.packed or self._recipe.positions != "full"
        counts = [row.document_labels for row in rows if row.document_labels is not None]
        return Batch(
            np.stack([row.ids for row in rows]),
            np.stack([row.labels for row in rows]),
            np.stack([row.positions for row in rows]) if gaps else None,
            self.packed,
            np.stack(counts) if counts else None,
        )

    def _row(self, at: int) -> TrainingSequence:
        recipe = self._recipe
        source, index = self._mixture.at(at)
        part = self._parts[source]
        if recipe.positions == "full":
            return part.at(index)
        positions = positions_of(
            recipe.positions, self.length, self._context_length, recipe.pose_chunks, recipe.seed, at
        )
        if recipe.positions == "pose":
            return part.skipping_at(index, positions)
        return replace(part.at(index), positions=positions)

    def fingerprint(self) -> str:
        """sha256 over the tokens and how they are selected, laid out and mixed.

        Streams with the same fingerprint give the same sequences, wherever the text and the cache are stored.
        """
        recipe = self._recipe
        gaps = None if recipe.positions == "full" else [recipe.positions, self._context_length]
        chunks = recipe.pose_chunks if recipe.positions == "pose" else None
        parts = [_FORMAT, self.length, recipe.seed, gaps, chunks, self._mixture.shares, list(self._made_of)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def summary(self) -> list[str]:
        """A sentence per source: sequences, and the percentages of documents used, skipped and cut."""
        shares = self._mixture.shares
        return [
            describe_source(source.data, part, source.sequences, share / sum(shares) if len(shares) > 1 else None)
            for source, part, share in zip(self._recipe.sources, self._parts, shares, strict=True)
        ]


def open_stream(
    recipe: Any,
    tokenizer,
    length: int,
    context_length: int,
    *,
    first: Callable[[], AbstractContextManager] = nullcontext,
) -> Stream:
    """Tokenize all sources and lay them out. Raises DataError, RecipeError, OutputError.

    length: of a sequence, tokens. context_length: range of positions for `pose` and `randomized`. first: a context that
    lets the main process run first, so that it tokenizes and the other processes reuse the tokens.
    """
    refuse_impossible_positions(recipe.positions, length, context_length, recipe.pose_chunks)
    parts, made_of = [], []
    for number, source in enumerate(recipe.sources):
        text = Source(
            source.data, source.text_column, source.split, TO_TRAIN, source.max_documents, source.skip_faulty
        ).limited("max_documents")
        measured = source.skip_compressible > 0 or source.skip_incompressible > 0
        with first():
            store = open_store(text, tokenizer, source.train_on, measured=measured)
        separator = _separator(tokenizer) if source.sequences == "concat" else None
        padding = (tokenizer.eos_token_id or 0) if source.sequences == "packed" else None
        selection, layout = _lay_out(source, number, store, length, recipe.seed, separated=separator is not None)
        part = SourceSequences(
            store,
            selection,
            layout,
            length,
            separator=separator,
            padding=padding,
            seed=recipe.seed,
            number=number,
            by_document=recipe.loss_weighting == "documents",
        )
        if not len(part):
            raise DataError(f"{source.data} contains no token to train on: no sequence has an answer of the assistant.")
        parts.append(part)
        choices = [source.sequences, source.long_from, source.keep_short, source.max_tokens]
        if store.compression is not None:
            choices += [source.skip_compressible, source.skip_incompressible]
        made_of.append([store.digest, separator, padding, *choices])
    return Stream(recipe, length, context_length, parts, made_of)


def _separator(tokenizer) -> int | None:
    """Token to put between documents, or None if the tokenizer already marks their start or end."""
    special = special_tokens(tokenizer)
    marked = special.bos in special.prefix or special.eos in special.suffix
    return None if marked else special.eos


def _lay_out(
    source: Any, number: int, store: TokenStore, length: int, seed: int, *, separated: bool
) -> tuple[Selection, SequenceLayout]:
    """Select the documents of a source and cut them into sequences. Raises DataError if none can be filled."""
    least = {"long": length, "packed": SHORTEST, "concat": 1}[source.sequences]
    if store.lengths.max(initial=0) < least:
        raise DataError(f"{source.data}: {none_long_enough(least, store.lengths)}")
    selection = select_documents(
        store.lengths,
        least,
        long_from=source.long_from,
        keep_short=source.keep_short,
        compression=store.compression,
        skip_compressible=source.skip_compressible,
        skip_incompressible=source.skip_incompressible,
        max_tokens=source.max_tokens,
        seed=seed,
        source=number,
    )
    if source.sequences == "packed":
        layout = pack(selection.lengths, length)
    elif source.sequences == "concat":
        layout = concatenate(selection.lengths, length, seeded_generator(seed, "concat", number), separated=separated)
    else:
        layout = cut_long(selection.lengths, length)
    if not len(layout):
        skipped = [f"{count:,} are {why}" for why, count in selection.skipped.items() if count]
        raise DataError(
            f"{source.data}: {len(selection.documents):,} documents with {selection.lengths.sum():,} tokens do not "
            f"fill a sequence of {length}. Of {selection.of:,} documents, {', '.join(skipped) or 'none is skipped'}. "
            "Use more documents or shorter sequences."
        )
    return selection, layout


def describe_source(name: str, part: SourceSequences, kind: str, share: float | None) -> str:
    """Summarize a source. share: its fraction of the stream; None if it is the only source."""
    selection, layout = part.selection, part.layout
    sizes = np.minimum(layout.stop, selection.lengths[layout.document]) - layout.start  # without separators
    pieces = np.bincount(layout.document[sizes > 0], minlength=len(selection.documents))
    of_document = np.bincount(layout.document, weights=sizes, minlength=len(selection.documents))
    is_cut = (pieces > 1) | (of_document < part.document_lengths)
    used, cut, tokens = int((pieces > 0).sum()), int((is_cut & (pieces > 0)).sum()), int(sizes.sum())
    documents = f"{used:,} of {selection.of:,} documents, {_share(used, selection.of)}"
    parts = [f"{name}: {len(part):,} sequences ({kind}) from {documents}"]
    if share is not None:
        parts.append(f"{share:.1%} of the stream")
    reasons = {
        **selection.skipped,
        "not in any sequence" if part.dropped else "left over at the end": len(selection.documents) - used,
    }
    parts += [f"{_share(count, selection.of)} of the documents are {why}" for why, count in reasons.items() if count]
    if cut:
        parts.append(f"{_share(cut, used)} of those used are cut")
    if left := int(selection.lengths.sum()) - tokens:
        parts.append(f"{_share(left, int(selection.lengths.sum()))} of their tokens are unused")
    if part.targets is not None:
        parts.append(f"{_share(int(part.targets.sum()), len(layout) * part.length)} of the tokens are trained on")
    if part.dropped:
        parts.append(f"{part.dropped:,} sequences without a token to train on are skipped")
    if padding := len(layout) * part.length - int((layout.stop - layout.start).sum()):
        parts.append(f"{_share(padding, len(layout) * part.length)} of the sequences is padding")
    return "; ".join(parts) + "."


def _share(part: int, total: int) -> str:
    """Percentage; never 0.0% for a non-empty part."""
    return f"{part / total:.1%}" if part / total >= 0.0005 else "under 0.1%"
