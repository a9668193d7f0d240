"""The documents of a source that a protocol can score."""

from typing import TYPE_CHECKING

from ropecli.data.documents import Documents, read_documents, special_tokens
from ropecli.data.sources import Texts
from ropecli.errors import DataError
from ropecli.evaluation.protocols import Protocol
from ropecli.evaluation.request import DocumentOptions, document_source
from ropecli.evaluation.verdict import ENOUGH
from ropecli.messages import progress_bar, say, warn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_texts(
    options: DocumentOptions,
    tokenizer: "PreTrainedTokenizerBase",
    lengths: list[int],
    protocol: Protocol,
    *,
    drop_rare: bool = False,
) -> tuple[Documents, list[int]]:
    """Read the documents that `protocol` can score at these lengths; warn about those that it skips.

    lengths: tokens, ascending. drop_rare: drop the longest lengths that fewer than 8 documents have. Returns the
    remaining lengths too.
    """
    reads_whole, most_tokens = protocol.reads_whole_documents, options["max_tokens"]
    special = special_tokens(tokenizer)
    least = lengths[0] if drop_rare else lengths[-1]  # tokens that a document needs
    if reads_whole:
        least = max(options["min_tokens"] or 0, protocol.least_tokens(special))
        if most_tokens and most_tokens < least:
            raise DataError(f"--max-tokens is {most_tokens}; a document needs {least} tokens.")
    source = document_source(options)
    if not options["max_documents"]:
        source = source.limited("--max-documents")  # a Hub dataset
    documents = read_with_bar(options, tokenizer, source.texts(), least, most_tokens if reads_whole else lengths[-1])
    if drop_rare:
        common = common_lengths(documents, lengths)
        if len(common) < len(lengths):
            have = count_documents(sum(len(document.ids) >= lengths[len(common)] for document in documents.kept))
            say(
                f"Measuring up to {common[-1]} tokens: only {have} of {documents.count} have {lengths[len(common)]}. "
                "Longer lengths: --lengths."
            )
        lengths = common
        if not reads_whole:
            least = lengths[-1]
            documents = documents.first(least)
    if documents.too_short:
        warn(f"Skipping {count_documents(documents.too_short)} shorter than {least} tokens.")
    shorter = sum(len(document.ids) < lengths[-1] for document in documents.kept)
    if shorter and protocol.name != "recall":
        warn(f"{count_documents(shorter)} shorter than {lengths[-1]} tokens: scored with less context.")
    return documents, lengths


def read_with_bar(
    options: DocumentOptions, tokenizer: "PreTrainedTokenizerBase", texts: Texts, least: int, cut: int | None
) -> Documents:
    """See read_documents; with a bar of progress."""
    most = options["max_documents"]
    with progress_bar("reading documents", None) as step:
        return read_documents(texts, tokenizer, least, most=most, cut=cut, count_bytes=True, advance=step)


def common_lengths(documents: Documents, lengths: list[int]) -> list[int]:
    """The lengths that 8 documents have, or all if there are fewer documents; the first at least."""
    enough = min(ENOUGH, len(documents.kept))
    size = sorted((len(document.ids) for document in documents.kept), reverse=True)[enough - 1]
    return [length for length in lengths if length <= size] or lengths[:1]


def count_documents(count: int) -> str:
    return "1 document" if count == 1 else f"{count} documents"
