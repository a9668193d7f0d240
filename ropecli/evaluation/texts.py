"""The documents of a source that a protocol can score."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ropecli.data.documents import Documents, read_documents, special_tokens
from ropecli.data.sources import Source
from ropecli.errors import DataError
from ropecli.evaluation.lengths import Lengths
from ropecli.evaluation.protocols import Protocol
from ropecli.evaluation.verdict import ENOUGH
from ropecli.messages import progress_bar, say, warn
from ropecli.options import DocumentOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def source_of(options: Mapping[str, Any]) -> Source:
    """options: TextOptions, and data."""
    return Source(options["data"], options["text_column"], options["split"], skip_faulty=options["skip_faulty"])


def read_texts(
    options: DocumentOptions, tokenizer: "PreTrainedTokenizerBase", lengths: Lengths, protocol: Protocol
) -> tuple[Documents, list[int]]:
    """Read the documents that `protocol` can score at these lengths; warn about those that it skips.

    Returns the lengths too: by default, without the longest ones that fewer than 8 documents have.
    """
    reads_whole, most_tokens, chosen = protocol.reads_whole_documents, options["max_tokens"], list(lengths.tokens)
    special = special_tokens(tokenizer)
    least = chosen[-1] if lengths.are_given else chosen[0]  # tokens that a document needs
    if reads_whole:
        least = protocol.least_tokens(special)
        if most_tokens and most_tokens < least:
            raise DataError(f"--max-tokens is {most_tokens}; a document needs {least} tokens.")
    source, cut = source_of(options), most_tokens if reads_whole else chosen[-1]
    if not options["max_documents"]:
        source = source.limited("--max-documents")  # a Hub dataset
    with progress_bar("reading documents", None) as step:
        reading: dict[str, Any] = {"most": options["max_documents"], "cut": cut, "count_bytes": True, "advance": step}
        documents = read_documents(source.texts(), tokenizer, least, **reading)
    if not lengths.are_given:
        common = common_lengths(documents, chosen)
        if len(common) < len(chosen):
            missing = chosen[len(common)]
            have = count_documents(sum(len(document.ids) >= missing for document in documents.kept))
            say(
                f"Measuring up to {common[-1]} tokens: only {have} of {documents.count} have {missing}. "
                "Longer lengths: --lengths."
            )
        chosen = common
        if not reads_whole:
            least = chosen[-1]
            documents = documents.first(least)
    if documents.too_short:
        warn(f"Skipping {count_documents(documents.too_short)} shorter than {least} tokens.")
    shorter = sum(len(document.ids) < chosen[-1] for document in documents.kept)
    if shorter and protocol.name != "recall":
        warn(f"{count_documents(shorter)} shorter than {chosen[-1]} tokens: scored with less context.")
    return documents, chosen


def common_lengths(documents: Documents, lengths: list[int]) -> list[int]:
    """The lengths that 8 documents have, or all if there are fewer documents; the first at least."""
    enough = min(ENOUGH, len(documents.kept))
    size = sorted((len(document.ids) for document in documents.kept), reverse=True)[enough - 1]
    return [length for length in lengths if length <= size] or lengths[:1]


def count_documents(count: int) -> str:
    return "1 document" if count == 1 else f"{count} documents"
