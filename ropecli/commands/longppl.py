"""Key tokens for `--protocol longppl`: found by an evaluator, or read from a file. Imports torch."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropecli.commands.messages import progress_bar, say, warn
from ropecli.commands.options import as_path
from ropecli.commands.subject import Subject, load, open_subject, refuse_attention
from ropecli.data.documents import Documents, read_documents, special_tokens
from ropecli.errors import DataError, MethodError
from ropecli.evaluation.longppl import (
    MAX_LOSS,
    MIN_GAIN,
    Keys,
    find_keys,
    fingerprint,
    read_keys,
    write_keys,
)
from ropecli.evaluation.processes import Workers
from ropecli.evaluation.protocols import Protocol, short_context
from ropecli.live.loading import load_tokenizer

if TYPE_CHECKING:
    from ropecli.commands.measuring import DataChoice

_FEW = 100
"""Fewer key tokens give wide intervals."""


def refuse_key_options(protocol: Protocol, evaluator: str | None, file: str | Path | None) -> None:
    """Raises MethodError for key tokens of another protocol, and for longppl without any."""
    if protocol.name != "longppl" and (evaluator or file):
        raise MethodError(f"--evaluator and --keys apply only to the protocol longppl, not to {protocol.name}.")
    if protocol.name == "longppl" and not (evaluator or file):
        raise MethodError(
            "The protocol longppl needs --evaluator CHECKPOINT, which finds the key tokens, or --keys FILE, which an "
            "earlier run wrote."
        )


def get_keys(
    evaluator: str | None,
    file: str | Path | None,
    data: "DataChoice",
    lengths: list[int],
    *,
    drop_rare: bool,
    **passes: Any,
) -> tuple[Keys, list[int]]:
    """Read the key tokens if `file` exists; otherwise find them, and write them to `file` if it is given.

    lengths: tokens, ascending. drop_rare: the user asked for none of them. passes: chunk, batch_size, loading, workers.
    Returns the lengths to measure too.
    """
    path = as_path(file) if file else None
    subject = open_subject(evaluator, {}) if evaluator else None
    if path and path.exists():
        keys = read_keys(path)
        if subject and not subject.checkpoint.matches(keys.digest):
            raise MethodError(
                f"{path} has the key tokens of another evaluator, {keys.evaluator}. Remove --evaluator to use them, or "
                "give another --keys FILE."
            )
        if drop_rare:
            lengths = [length for length in lengths if length <= keys.length] or [keys.length]
        if lengths[-1] > keys.length:
            raise MethodError(
                f"{path} has the key tokens of up to {keys.length} tokens; --lengths asks for {lengths[-1]}. Use "
                "shorter lengths, or find key tokens again with --evaluator and another --keys FILE."
            )
        return keys, lengths
    if subject is None:
        raise DataError(f"--keys {path} does not exist. To find key tokens and write them there, add --evaluator.")
    keys, lengths = _find(subject, data, lengths, drop_rare=drop_rare, **passes)
    if path and passes["workers"].first:
        write_keys(path, keys)
    return keys, lengths


def _find(
    subject: Subject,
    data: "DataChoice",
    lengths: list[int],
    *,
    drop_rare: bool,
    chunk: int | None,
    batch_size: int,
    loading: dict[str, Any],
    workers: Workers,
) -> tuple[Keys, list[int]]:
    checkpoint, (pretrained, context_length) = subject.checkpoint, subject.reach
    refuse_attention(checkpoint, None, loading["attn"])
    for warning in subject.warnings:
        warn(f"the evaluator: {warning}")
    context = short_context(pretrained)
    hashes: dict[str, str] = {}

    def hashed() -> Iterator[tuple[str, str]]:
        for name, text in data.texts():
            hashes[name] = fingerprint(text)
            yield name, text

    tokenizer = load_tokenizer(checkpoint)
    documents, lengths = data.read(
        tokenizer, lengths, Protocol("longppl"), drop_rare=drop_rare, texts=hashed(), keep_spans=True
    )
    if lengths[-1] <= context.first:
        raise DataError(
            f"The longest length is {lengths[-1]} tokens; longppl needs more than {context.first}, because the "
            f"evaluator {checkpoint.name} has a short context of {context.tokens}."
        )
    if lengths[-1] > context_length:
        warn(
            f"The evaluator reads {lengths[-1]} tokens, but its context length is {context_length}: it may find few or "
            "wrong key tokens."
        )
    model = load(checkpoint, tokenizer, **loading)
    with progress_bar("finding key tokens", len(workers.share(documents.kept))) as step:
        options = {"chunk": chunk, "batch_size": batch_size, "workers": workers, "advance": step, "say": warn}
        found = find_keys(model, documents, hashes, lengths[-1], context, **options)
    keys = Keys(
        checkpoint.name,
        checkpoint.digest(),
        lengths[-1],
        context.tokens,
        context.stride,
        MIN_GAIN,
        MAX_LOSS,
        found,
    )
    return keys, lengths


def read_marked(data: "DataChoice", tokenizer: Any, keys: Keys) -> Documents:
    """The documents that have key tokens, cut to the text that the evaluator read. Says how many tokens are key."""
    special = special_tokens(tokenizer)
    with progress_bar("reading documents", None) as step:
        documents = read_documents(
            keys.select(data.texts(whole=True)),  # ends with the last document that has keys
            tokenizer,
            special.first_scored + 1 + len(special.suffix),
            most=data.max_documents,
            count_bytes=True,
            keep_spans=True,
            advance=step,
        )
    documents, count = keys.mark(documents)
    tokens = sum(len(document.ids) for document in documents.kept)
    if not count:
        raise DataError(
            f"The evaluator {keys.evaluator} found no key tokens in {len(documents.kept)} documents. Use longer "
            "lengths, other data, or an evaluator that uses its context better."
        )
    say(
        f"{count:,} of {tokens:,} tokens in {len(documents.kept)} documents are key tokens ({count / tokens:.1%}), "
        f"found by {keys.evaluator} with {keys.length:,} instead of {keys.short_context:,} tokens of context."
    )
    if count < _FEW:
        warn(f"{count} key tokens give wide intervals. Use more documents or longer lengths.")
    return documents
