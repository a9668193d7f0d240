"""Key tokens for LongPPL: the tokens that a model predicts well only with a long context.

Fang et al. 2025, "What is Wrong with Perplexity for Long-context Language Modeling?", arXiv:2410.23771, section 3. An
evaluator model reads each document whole, and again with a short context. A token is a key token if the long context
raises its log-probability by more than `min_gain`, and its loss with the long context is below `max_loss`. Key tokens
are stored as positions, so a model is scored on them only if its tokenizer is the evaluator's.

As in the authors' package, longppl 0.3.0: the short context grows from K to K + stride − 1 tokens within a window, and
windows do not start with <s>. Unlike there, a document starts with what the tokenizer puts before every text, such as
<s>.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Interval, Len

from ropecli.atomic import sibling
from ropecli.checkpoint.files import read_file
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.data.documents import Documents
from ropecli.data.sources import Texts
from ropecli.errors import DataError, MethodError
from ropecli.evaluation.driver import Job, SampleId, Task, collect
from ropecli.evaluation.processes import Workers
from ropecli.evaluation.protocols import Protocol, ShortContext, Window, short_context
from ropecli.evaluation.readers.reader import Reader
from ropecli.evaluation.report import write_report
from ropecli.evaluation.request import DocumentOptions, PerplexityOptions, document_source
from ropecli.evaluation.statistics import Count, TokenCount
from ropecli.evaluation.subject import ReaderFactory, Subject, refuse_attention
from ropecli.evaluation.texts import read_texts, read_with_bar
from ropecli.hashing import digest
from ropecli.live.loading import load_tokenizer
from ropecli.messages import say, warn
from ropecli.resume import remove_state

MIN_GAIN = 2.0
MAX_LOSS = 2.0
_FEW = 100
"""Fewer key tokens give wide intervals."""


@dataclass(frozen=True)
class DocumentKeyTokens:
    """The key tokens of one document. tokens: how many the evaluator read. sha256: of their ids.

    positions: of the key tokens, ascending.
    """

    name: str
    tokens: TokenCount
    sha256: str
    positions: tuple[Count, ...]


@dataclass(frozen=True)
class KeyTokens:
    """The key tokens of a data set, for any number of models with the same tokenizer. digest: of the evaluator.

    vocabulary: see vocabulary_digest. length: tokens that the evaluator read of each document. short_context, stride:
    tokens, see ShortContext. min_gain, max_loss: nats. checksum: of all else, written by write_key_tokens.
    """

    evaluator: str
    digest: str
    vocabulary: str
    length: TokenCount
    short_context: TokenCount
    stride: TokenCount
    min_gain: float
    max_loss: float
    documents: Annotated[tuple[DocumentKeyTokens, ...], Len(1)]
    kind: Literal["longppl-keys"] = "longppl-keys"
    schema_version: Annotated[int, Interval(ge=1, le=1)] = 1
    checksum: str = field(default="", compare=False)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that determine the key tokens, for reports."""
        names = ("evaluator", "digest", "length", "short_context", "stride", "min_gain", "max_loss")
        return {name: getattr(self, name) for name in names}

    def computed_checksum(self) -> str:
        return digest(asdict(replace(self, checksum="")))

    def select(self, texts: Texts) -> Iterator[tuple[str, str]]:
        """The texts that the evaluator read, up to the last of them. Raises DataError if one is missing."""
        left = {document.name for document in self.documents}
        for name, text in texts:
            if name in left:
                left.remove(name)
                yield name, text
            if not left:
                return
        raise DataError(f"The key tokens were found in other data: {min(left)} is not in --data.")


class FindKeyTokens(Task):
    """Finds the key tokens of each document with an evaluator: the positions, ascending.

    documents: each has `length` tokens.
    """

    name = "finding key tokens"
    documents: Documents
    answers = False

    def __init__(self, documents: Documents, context: ShortContext, length: int) -> None:
        self.documents, self.context, self.length = documents, context, length

    def request(self) -> dict[str, Any]:
        return {"task": self.name, "data": self.documents.fingerprint(), **asdict(self.context)}

    def longest(self) -> tuple[np.ndarray, int, int]:
        largest = max(int(document.ids.max()) for document in self.documents.kept)
        return self.documents.kept[0].ids, self.length, largest

    def samples(self, *, one_pass: bool) -> list[SampleId]:
        # a sample per document: its windows fill the batches
        return [(index, self.length) for index in range(len(self.documents.kept))]

    def tokens(self, sample: SampleId) -> int:
        return self.length + sum(stop - start for start, stop in self.context.windows(self.length))

    def pass_length(self, sample: SampleId) -> int:
        return self.length

    def score(self, reader: Reader, batch: Sequence[SampleId]) -> list[Any]:
        return [self._positions(reader, self.documents.kept[index].ids) for index, _ in batch]

    def _positions(self, reader: Reader, ids: np.ndarray) -> list[int]:
        windows = [Window(ids, len(ids) - 1, len(ids))]
        for start, stop in self.context.windows(len(ids)):
            windows.append(Window(ids[start:stop], stop - start - self.context.tokens, stop))
        losses = list(reader.losses(windows))
        long, short = losses[0][self.context.first - 1 :], np.concatenate(losses[1:])
        is_key = (short - long > MIN_GAIN) & (long < MAX_LOSS)
        return (self.context.first + np.flatnonzero(is_key)).tolist()


def vocabulary_digest(tokenizer: Any) -> str:
    """sha256 of the vocabulary without added tokens: fine-tuned models often have one more, for padding."""
    tokens = tokenizer.get_vocab().items() - tokenizer.get_added_vocab().items()
    return digest(sorted(tokens))


def write_key_tokens(path: Path, key_tokens: KeyTokens) -> None:
    """Write the file of key tokens atomically. Raises OSError."""
    write_report(path, asdict(replace(key_tokens, checksum=key_tokens.computed_checksum())))


def read_key_tokens(path: Path) -> KeyTokens:
    """Read a file that write_key_tokens wrote. Raises DataError."""
    from pydantic import TypeAdapter

    key_tokens: KeyTokens = read_file(path, TypeAdapter(KeyTokens).validate_json)
    if key_tokens.checksum != key_tokens.computed_checksum():
        raise DataError(f"{path} is damaged: it does not match its checksum. Find the key tokens again.")
    return key_tokens


def get_key_tokens(
    options: PerplexityOptions,
    path: Path | None,
    lengths: list[int],
    factory: ReaderFactory,
    workers: Workers,
    tokenizers: Mapping[str, Any],
    output: Path | None = None,
) -> KeyTokens:
    """Read the key tokens if `path` exists; otherwise find them, and write them to `path` if it is given.

    lengths: tokens, ascending. tokenizers: of the checkpoints to score, by name. output: of the command; without a
    `path`, progress is saved next to it.
    """
    subject = None
    if evaluator := options["evaluator"]:
        subject = Subject(open_checkpoint(evaluator, weights=True, tokenizer=True, adapters=True))
    if path and path.exists():
        key_tokens = read_key_tokens(path)
        if subject and key_tokens.digest != subject.checkpoint.digest():
            raise MethodError(
                f"{path} has the key tokens of another evaluator, {key_tokens.evaluator}. Remove --evaluator to use "
                "them, or give another --keys FILE."
            )
        _refuse_other_tokenizers(key_tokens.evaluator, key_tokens.vocabulary, tokenizers)
        if options["lengths"] and lengths[-1] > key_tokens.length:
            raise MethodError(
                f"{path} has the key tokens of up to {key_tokens.length} tokens; --lengths asks for {lengths[-1]}. Use "
                "shorter lengths, or find key tokens again with --evaluator and another --keys FILE."
            )
        return key_tokens
    if subject is None:
        raise DataError(f"--keys {path} does not exist. To find key tokens and write them there, add --evaluator.")
    progress = path or (sibling(output, ".keys") if output else None)
    tokenizer = load_tokenizer(subject.checkpoint)
    _refuse_other_tokenizers(subject.checkpoint.name, vocabulary_digest(tokenizer), tokenizers)
    key_tokens = _find(subject, tokenizer, options, lengths, factory, workers, progress)
    if not any(document.positions for document in key_tokens.documents):
        if workers.first:
            remove_state(progress)  # it would be in the way of other lengths and data
        raise DataError(
            f"The evaluator {key_tokens.evaluator} found no key tokens in {len(key_tokens.documents)} documents. Use "
            "longer lengths, other data, or an evaluator that uses its context better."
        )
    if path and workers.first:
        write_key_tokens(path, key_tokens)
        remove_state(path)
    return key_tokens


def _refuse_other_tokenizers(evaluator: str, vocabulary: str, tokenizers: Mapping[str, Any]) -> None:
    for name, tokenizer in tokenizers.items():
        if vocabulary_digest(tokenizer) != vocabulary:
            raise MethodError(
                f"The evaluator {evaluator} has another tokenizer than {name}; use an evaluator with the same one."
            )


def _find(
    subject: Subject,
    tokenizer: Any,
    options: PerplexityOptions,
    lengths: list[int],
    factory: ReaderFactory,
    workers: Workers,
    output: Path | None,
) -> KeyTokens:
    checkpoint = subject.checkpoint
    refuse_attention(subject, factory.settings["attn"])
    for finding in subject.findings:
        warn(f"the evaluator: {finding.message}")
    context = short_context(subject.positions.pretraining_length)
    drop_rare = options["lengths"] is None
    documents, lengths = read_texts(options, tokenizer, lengths, Protocol("longppl"), drop_rare=drop_rare)
    if lengths[-1] <= context.first:
        raise DataError(
            f"The longest length is {lengths[-1]} tokens; longppl needs more than {context.first}, because the "
            f"evaluator {checkpoint.name} has a short context of {context.tokens}."
        )
    if lengths[-1] > (most := subject.positions.context_length):
        warn(
            f"The evaluator reads {lengths[-1]} tokens, but its context length is {most}: it may "
            "find few or wrong key tokens."
        )
    job = Job(subject, FindKeyTokens(documents, context, lengths[-1]), tokenizer)
    ((_, values, _),) = collect([job], factory, output, workers)
    key_documents = tuple(
        DocumentKeyTokens(document.name, len(document.ids), digest(document.ids), tuple(positions))
        for document, positions in zip(documents.kept, values.values(), strict=True)
    )
    read_with = (lengths[-1], context.tokens, context.stride, MIN_GAIN, MAX_LOSS)
    vocabulary = vocabulary_digest(tokenizer)
    return KeyTokens(checkpoint.name, checkpoint.digest(), vocabulary, *read_with, key_documents)


def read_marked(options: DocumentOptions, tokenizer: Any, key_tokens: KeyTokens) -> Documents:
    """The documents and tokens that the evaluator read, with Document.key_tokens. Says how many are key.

    Raises DataError for tokens that the evaluator did not read.
    """
    of_evaluator = {document.name: document for document in key_tokens.documents}
    texts = key_tokens.select(document_source(options).texts())
    documents = read_with_bar(options, tokenizer, texts, 0, max(document.tokens for document in key_tokens.documents))
    marked = []
    for document in documents.kept:
        if digest(document.ids) != of_evaluator[document.name].sha256:
            raise DataError(f"The key tokens were found in another text of {document.name}. Find them again.")
        positions = np.array(of_evaluator[document.name].positions, dtype=np.int64)
        marked.append(replace(document, key_tokens=positions))
    count = sum(len(of_evaluator[document.name].positions) for document in marked)
    tokens = sum(len(document.ids) for document in marked)
    say(
        f"{count:,} of {tokens:,} tokens in {len(marked)} documents are key tokens ({count / tokens:.1%}), "
        f"found by {key_tokens.evaluator} with {key_tokens.length:,} instead of {key_tokens.short_context:,} tokens of "
        "context."
    )
    if count < _FEW:
        warn(f"{count} key tokens give wide intervals. Use more documents or longer lengths.")
    return replace(documents, kept=tuple(marked))
