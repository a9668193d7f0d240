"""Training sequences of one length from all sources of a recipe, as a function of the stream position."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from ropecli.data.documents import none_long_enough, special_tokens
from ropecli.data.sampling import (
    Mixture,
    Selection,
    positions_of,
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
    pieces_of,
)
from ropecli.data.sources import TO_TRAIN, Source
from ropecli.data.token_store import UNKNOWN_END, TokenStore, open_store
from ropecli.errors import DataError
from ropecli.hashing import digest
from ropecli.messages import Span, say

Array = TypeVar("Array", bound=Any)
_FORMAT = 2
"""Version of the fingerprint. Runs with another one cannot be resumed."""
_SAMPLE = 64
"""Sequences to look at where positions have gaps."""
_CHAT_ENDS = {
    "<|im_end|>": "<|endoftext|>",
    "<|eot_id|>": "<|end_of_text|>",
    "<|eom_id|>": "<|end_of_text|>",
    "<|return|>": "<|endoftext|>",
    "<|end|>": "<|endoftext|>",
    "<|END_OF_TURN_TOKEN|>": "<EOS_TOKEN>",
    "<end_of_turn>": "<eos>",
    "<turn|>": "<eos>",
}
"""The end of an answer, which chat models have as eos, and of a text, as their base models' tokenizers have it.

Qwen 2 to 3.8, SmolLM2, Phi-4 and Yi: Qwen/Qwen3-8B-Base and HuggingFaceTB/SmolLM2-1.7B, tokenizer_config.json. Llama 3:
meta-llama/Llama-3.1-8B. gpt-oss: openai/harmony, <|endoftext|>. Command: CohereLabs/c4ai-command-r-v01. Gemma:
google/gemma-3-4b-pt.
"""
_WITH_ENDS = ("packed", "concat")
"""Layouts in which a token ends each text."""
_TEXT_ENDS = ("</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "<EOS_TOKEN>", "<｜end▁of▁sentence｜>")
"""Ends of a text that chat models have as eos, too: Llama 2, Mistral, DeepSeek."""


class Batch(NamedTuple, Generic[Array]):
    """The arguments of NextTokenLoss.forward. Arrays; of the part that a process takes to its device, tensors.

    ids, labels: shape (sequences, length), int64. labels[i, t] is the token after ids[i, t], -100 if not scored.
    positions: the same shape, or None for 0, 1, 2 ... in every row. packed: positions restart at each document.
    document_labels: the same shape, the number of scored labels of the document that a label belongs to, in all of the
    document's pieces; None if every label has the same weight.
    """

    ids: Array
    labels: Array
    positions: Array | None = None
    packed: bool = False
    document_labels: Array | None = None

    @property
    def weight(self) -> float:
        """Sum of the weights of all scored labels: their number, or the number of documents that they make up."""
        scored = self.labels != UNSCORED
        return float(scored.sum() if self.document_labels is None else (1 / self.document_labels[scored]).sum())


class Stream:
    """Training sequences of one length, by position. packed: whether positions restart in any of them.

    recipe: see training/recipe_schema.py. kinds: the layout of each source. tokenizer: to show sequences.
    """

    def __init__(
        self,
        recipe: Any,
        length: int,
        context_length: int,
        parts: Sequence[SourceSequences],
        kinds: Sequence[str],
        made_of: Sequence[object],
        tokenizer: Any = None,
    ) -> None:
        self.length = length
        self.packed = "packed" in kinds
        self._recipe, self._context_length, self._parts, self._made_of = recipe, context_length, parts, made_of
        self._kinds, self._tokenizer = kinds, tokenizer
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
        span = self._context_length
        positions = positions_of(recipe.positions, self.length, span, recipe.pose_chunks, recipe.seed, at)
        if recipe.positions == "pose":
            return part.skipping_at(index, positions)
        return replace(part.at(index), positions=positions)

    def fingerprint(self) -> str:
        """sha256 over the tokens and how they are selected, laid out and mixed.

        Streams with the same fingerprint give the same sequences, wherever the text and the cache are stored.
        """
        recipe = self._recipe
        gaps = None if recipe.positions == "full" else [recipe.positions, self._context_length]
        of_mixture = self._mixture.shares, list(self._made_of)
        chunks = recipe.pose_chunks if recipe.positions == "pose" else None
        return digest(_FORMAT, self.length, recipe.seed, gaps, chunks, *of_mixture)

    def summary(self, pretraining_length: int, context_length: int, weighed_from: int | None = None) -> list[str]:
        """A sentence per source, and the share of the labels that need a longer context than the pretraining length.

        context_length: tokens that the checkpoint reads. weighed_from: tokens before a token from which the loss weighs
        it. The first sentence is a warning if what is trained on is shorter, or needs no longer context than the
        pretraining length, or if nothing is weighed.
        """
        shares = self._mixture.shares
        sentences = [
            describe_source(source.data, part, kind, share / sum(shares) if len(shares) > 1 else None)
            for source, part, kind, share in zip(self._recipe.sources, self._parts, self._kinds, shares, strict=True)
        ]
        if weighed_from and not self._far_share(weighed_from):
            unweighed = f"no trained token has {weighed_from:,} tokens before it, so loss: longce weighs all alike"
            sentences.insert(0, f"warning: {unweighed}. Use longer documents, or loss: next-token.")
        longest = self.length if self._recipe.positions == "full" else self._context_length
        shorter = (
            f"the checkpoint reads {context_length:,} tokens, and may read them worse after training on {longest:,}"
        )
        is_patched = context_length > pretraining_length
        far = self._far_share(pretraining_length) if is_patched else 0
        if is_patched and not far:
            more = f"; {shorter}" if longest < context_length else ""
            sentences.insert(
                0,
                f"warning: no trained token has more than {pretraining_length:,} tokens before it, so this trains "
                f"nothing beyond the pretraining length{more}. Use longer documents and a greater --length, or "
                "--positions pose.",
            )
        elif longest < context_length:
            sentences.insert(0, f"warning: {shorter}. Use --length {context_length}, or --positions pose.")
        if far:
            share = f"{_share(far)} of the trained tokens have more than {pretraining_length:,} tokens before them"
            sentences.append(f"{share}, the pretraining length.")
        return sentences

    def _far_share(self, pretraining_length: int) -> float:
        """Share of the labels whose token has more positions before it than the model was pretrained with."""
        if self._recipe.positions != "full":  # they differ in each sequence
            rows = [self._row(at) for at in range(_SAMPLE)]
            positions = np.concatenate([row.positions[row.labels != UNSCORED] for row in rows])
            return float((positions >= pretraining_length).mean())
        counts = [part.far_labels(pretraining_length) for part in self._parts]
        weights = [share / len(part) for share, part in zip(self._mixture.shares, self._parts, strict=True)]
        far, labels = (
            sum(weight * count[index] for weight, count in zip(weights, counts, strict=True)) for index in (0, 1)
        )
        return far / labels

    def shown(self, count: int) -> list[list[Span]]:
        """The first sequences as the model gets them, with remarks where a document begins or positions skip."""
        count = min(count, len(self))
        return [
            [Span(f"sequence {at + 1} of {len(self):,}"), *self._spans(self._row(at)), Span("end")]
            for at in range(count)
        ]

    def _spans(self, row: TrainingSequence) -> list[Span]:
        trained = np.append(False, row.labels[:-1] != UNSCORED)  # a label is the next token
        skips = np.append(0, np.diff(row.positions) - 1)
        borders = np.flatnonzero((skips != 0) | np.append(True, np.diff(trained.astype(np.int8)) != 0))
        borders, end = borders[borders < len(row.ids) - row.padding], len(row.ids) - row.padding
        spans: list[Span] = []
        for start, stop in zip(borders.tolist(), [*borders[1:].tolist(), end], strict=True):
            if skips[start]:
                spans.append(Span(f"position {row.positions[start]:,}" if skips[start] > 0 else "a document begins"))
            ids = row.ids[start:stop].tolist()
            text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            spans.append(Span(text, bool(trained[start])))
        return [*spans, Span(f"{row.padding:,} tokens of padding")] if row.padding else spans


def open_stream(
    recipe: Any,
    tokenizer,
    length: int,
    context_length: int,
    *,
    why_unpackable: Callable[[], str] = lambda: "",
    held_out: Sequence[np.ndarray] = (),
) -> Stream:
    """Tokenize all sources and lay them out. Of several processes, one tokenizes. Raises DataError, OutputError.

    length: of a sequence, tokens. context_length: range of positions with gaps. why_unpackable: tells why
    conversations cannot be packed; empty if they can. held_out: token ids; documents that begin so are not used.
    """
    parts, kinds, made_of = [], [], []
    for number, source in enumerate(recipe.sources):
        text = Source(
            source.data, source.text_column, source.split, TO_TRAIN, source.max_documents, source.skip_faulty
        ).limited("max_documents")
        options: dict[str, Any] = {"drop_unrendered": source.drop_unrendered}
        has_ends = source.sequences in _WITH_ENDS
        end = end_of_text(tokenizer, source.end_token) if has_ends or source.end_token else None
        store = open_store(text, tokenizer, source.train_on, end=end if has_ends else None, **options)
        kind = _layout_of(source, store, why_unpackable)
        if kind in _WITH_ENDS and not has_ends and store.has_texts:  # beside conversations, which are packed
            end = end_of_text(tokenizer, source.end_token)
            store = open_store(text, tokenizer, source.train_on, end=end, **options)
        _refuse_without_effect(source, store, kind)
        selection, layout = _lay_out(source, kind, number, store, length, recipe.seed, held_out)
        padding = (tokenizer.eos_token_id or 0) if kind in ("packed", "single") else 0
        part = SourceSequences(
            store,
            selection,
            layout,
            length,
            padding=padding,
            packed=kind == "packed",
            seed=recipe.seed,
            number=number,
            by_document=recipe.loss_weighting == "documents",
        )
        if not len(part):
            raise DataError(
                f"{source.data} contains no answer of the assistant in sequences of {length} tokens: "
                f"{part.lost_answers:,} are in longer conversations."
            )
        parts.append(part)
        kinds.append(kind)
        choices = [kind, source.overlong, source.long_from, source.keep_short, source.max_tokens]
        made_of.append([store.digest, padding, *choices, *([digest(*held_out)] if held_out else [])])
    return Stream(recipe, length, context_length, parts, kinds, made_of, tokenizer)


def end_of_text(tokenizer, choice: str | None) -> int | None:
    """The token that ends a text, as the model was pretrained; None if the tokenizer adds it itself, and for `none`.

    choice: of the recipe. Without it: a base model's eos; of a chat model, whose eos may end an answer, a known one,
    else UNKNOWN_END. Raises DataError for a choice that is not a token.
    """
    if choice == "none":
        return None
    special, vocabulary = special_tokens(tokenizer), tokenizer.get_vocab()
    if choice is None and getattr(tokenizer, "chat_template", None) and tokenizer.eos_token not in _TEXT_ENDS:
        known = _CHAT_ENDS.get(tokenizer.eos_token)
        choice = known if known in vocabulary else None
    elif choice is None:
        choice = tokenizer.eos_token
    if choice is None:
        return UNKNOWN_END
    if choice not in vocabulary:
        raise DataError(f"end_token is {choice!r}, which is not a token of the tokenizer.")
    return None if vocabulary[choice] in special.suffix else vocabulary[choice]


def _layout_of(source: Any, store: TokenStore, why_unpackable: Callable[[], str]) -> str:
    """The layout of a source, as asked for or by default. Says what it chooses for conversations."""
    if not store.has_conversations:
        return source.sequences or "long"
    if source.sequences in ("long", "concat"):
        raise DataError(
            f"{source.data}: --sequences {source.sequences} cuts conversations anywhere. Use packed, single (one "
            "conversation per sequence), or the default."
        )
    if source.sequences:
        return source.sequences
    if why := why_unpackable():
        say(f"{source.data}: one conversation per sequence: {why.removesuffix('.')}.")
        return "single"
    say(f"{source.data}: packing conversations, each attending to itself.")
    return "packed"


def _refuse_without_effect(source: Any, store: TokenStore, kind: str) -> None:
    """Raise DataError for a key that has no effect on what the source contains."""
    needs = {
        "end_token": (store.has_texts and kind in _WITH_ENDS, "texts in packed or concat sequences"),
        "overlong": (source.overlong == "drop" or store.has_conversations, "conversations"),
        "drop_unrendered": (store.has_conversations, "conversations"),
    }
    for key, (has_effect, needed) in needs.items():
        if getattr(source, key) and not has_effect:
            raise DataError(f"{source.data}: {key} has an effect only on {needed}, which it has not. Remove {key}.")


def _lay_out(
    source: Any,
    kind: str,
    number: int,
    store: TokenStore,
    length: int,
    seed: int,
    held_out: Sequence[np.ndarray],
) -> tuple[Selection, SequenceLayout]:
    """Select the documents of a source and cut them into sequences. Raises DataError if none can be filled."""
    least = {"long": length, "packed": SHORTEST, "single": SHORTEST, "concat": 1}[kind]
    if store.lengths.max(initial=0) < least:
        packed = " Or use --sequences packed." if kind == "long" else ""
        raise DataError(f"{source.data}: {none_long_enough(least, store.lengths)}{packed}")
    selection = select_documents(
        store.lengths,
        least,
        held_out=_begin_as(store, held_out) if held_out else None,
        long_from=source.long_from,
        keep_short=source.keep_short,
        max_tokens=source.max_tokens,
        seed=seed,
        source=number,
    )
    if kind == "concat":
        layout = concatenate(selection.lengths, length, seeded_generator(seed, "concat", number))
    elif kind == "long":
        layout = cut_long(selection.lengths, length)
    else:
        layout = pieces_of(store, selection, length, cut=source.overlong == "cut")
        layout = pack(layout, length) if kind == "packed" else layout
    if not len(layout) and store.has_conversations and len(selection.documents):
        raise DataError(
            f"{source.data}: all {len(selection.documents):,} conversations are longer than a sequence of {length} "
            f"tokens; the shortest has {selection.lengths.min():,}. Use a greater --length, or overlong: cut."
        )
    if not len(layout):
        skipped = [f"{count:,} are {why}" for why, count in selection.skipped.items() if count]
        raise DataError(
            f"{source.data}: {len(selection.documents):,} documents with {selection.lengths.sum():,} tokens do not "
            f"fill a sequence of {length}. Of {selection.of:,} documents, {', '.join(skipped) or 'none is skipped'}. "
            "Use more documents or shorter sequences."
        )
    return selection, layout


def _begin_as(store: TokenStore, texts: Sequence[np.ndarray]) -> np.ndarray:
    """Whether each document begins as one of the texts, token ids. Shape (documents,), bool."""
    known, sizes = {digest(ids) for ids in texts}, {len(ids) for ids in texts}
    return np.array(
        [
            any(size <= length and digest(store.read(number, 0, size)[0]) in known for size in sizes)
            for number, length in enumerate(store.lengths)
        ]
    )


def describe_source(name: str, part: SourceSequences, kind: str, share: float | None) -> str:
    """Summarize a source. share: its fraction of the stream; None if it is the only source."""
    selection, layout = part.selection, part.layout
    sizes = layout.stop - layout.start
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
        "left over at the end" if kind in ("long", "concat") else "in no sequence": len(selection.documents) - used,
    }
    parts += [f"{_share(count, selection.of)} of the documents are {why}" for why, count in reasons.items() if count]
    if cut:
        parts.append(f"{_share(cut, used)} of those used are cut")
    if left := int(selection.lengths.sum()) - tokens:
        parts.append(f"{_share(left, int(selection.lengths.sum()))} of their tokens are unused")
    if part.targets is not None:
        labels = int(part.targets.sum())
        trained = _share(labels, len(layout) * part.length)
        parts.append(f"{part.answers:,} answers with {labels:,} tokens to train on, {trained} of all")
    if part.lost_answers:
        parts.append(f"{part.lost_answers:,} answers are lost, in conversations longer than a sequence")
    if part.dropped:
        parts.append(f"{part.dropped:,} sequences without a token to train on are skipped")
    if padding := len(layout) * part.length - int((layout.stop - layout.start).sum()):
        parts.append(f"{_share(padding, len(layout) * part.length)} of the sequences is padding")
    return "; ".join(parts) + "."


def _share(part: float, total: float = 1) -> str:
    """Percentage; never 0.0% for a non-empty part."""
    return f"{part / total:.1%}" if part / total >= 0.0005 else "under 0.1%"
