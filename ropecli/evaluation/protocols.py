"""The protocols: which windows of a document the model reads, and which of their tokens are scored. No model.

What each is for, and its formula: protocol_descriptions.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ropecli.data.documents import Document, SpecialTokens
from ropecli.errors import DataError, did_you_mean
from ropecli.evaluation.protocol_descriptions import PROTOCOLS

YARN_STRIDE = 256


@dataclass(frozen=True)
class Window:
    """One stretch of a document as the model reads it.

    ids: shape (tokens,), int64. targets: how many of its last tokens are scored. stop: where in the document the last
    of them ends. reads_last: whether the model reads the last token too, which tells nothing of the targets.
    """

    ids: np.ndarray
    targets: int
    stop: int
    reads_last: bool = True

    @property
    def read(self) -> int:
        """How many of ids the model reads."""
        return len(self.ids) if self.reads_last else len(self.ids) - 1


@dataclass(frozen=True)
class Protocol:
    """A protocol with its settings. Raises DataError for an unknown name, and for a setting of another protocol.

    stride: of `sliding`, tokens; half of each length unless given. targets: of `tail`, tokens scored per document;
    half the shortest length unless given.
    """

    name: str
    stride: int | None = None
    targets: int | None = None

    def __post_init__(self) -> None:
        if self.name not in PROTOCOLS:
            hint = did_you_mean(self.name, PROTOCOLS)
            raise DataError(f"Unknown protocol {self.name!r}. Known: {', '.join(PROTOCOLS)}.{hint}")
        for key, owner in (("stride", "sliding"), ("targets", "tail")):
            if getattr(self, key) is not None and self.name != owner:
                raise DataError(f"{key} is for the protocol {owner}; {self.name} has none.")

    @property
    def reads_whole_documents(self) -> bool:
        return self.name in ("sliding", "disjoint", "yarn")

    @property
    def scores_the_same_tokens(self) -> bool:
        """Whether every length scores the same tokens, so that lengths may be compared with each other."""
        return self.name in ("tail", "sliding", "disjoint")

    def inserted(self, special: SpecialTokens) -> int | None:
        """The token that the protocol itself puts before a text, where the tokenizer has one for that."""
        if self.name == "yarn":
            return special.bos
        if self.name == "disjoint":
            return special.eos if special.bos is None else special.bos
        return None

    def settled(self, lengths: list[int], special: SpecialTokens) -> "Protocol":
        """With what is worked out from the lengths, tokens, ascending. Raises DataError for what does not fit them."""
        begun = 1 if self.name in ("disjoint", "yarn") else special.first_scored
        if not lengths or lengths[0] <= begun:
            raise DataError(
                f"The lengths are {lengths}; each must be at least {begun + 1} tokens, of which the last can be scored."
            )
        room = lengths[0] - begun
        half = lengths[0] // 2
        stride = half if self.name == "sliding" and self.stride is None else self.stride
        targets = half if self.name == "tail" and self.targets is None else self.targets
        for value, what in ((stride, "a stride of {} tokens does"), (targets, "{} target tokens do")):
            if value is not None and not 0 < value <= room:
                shortest = f"the shortest length, {lengths[0]} tokens, must exceed"
                raise DataError(f"{what.format(value).capitalize()} not fit: {shortest} that by {lengths[0] - room}.")
        return Protocol(self.name, self.stride, targets)

    def windows(self, document: Document, special: SpecialTokens, length: int, longest: int) -> Iterator[Window]:
        """The windows of one document for one length, of which `longest` is the largest to be measured."""
        match self.name:
            case "prefix":
                yield Window(document.ids[:length], length - special.first_scored, length)
            case "tail":
                ids = _begun(special.prefix, document.ids[longest - length : longest])
                yield Window(ids, self.targets or 0, longest)
            case "sliding":
                yield from _sliding(special.ended(document.ids), special, length, self.stride or length // 2)
            case "disjoint":
                yield from _disjoint(special, document.ids, length, self.inserted(special))
            case "yarn":
                yield from _yarn(special, document.ids, length, self.inserted(special))


def _sliding(ids: np.ndarray, special: SpecialTokens, length: int, stride: int) -> Iterator[Window]:
    scored = special.first_scored
    for start in range(0, len(ids), stride):
        stop = min(start + length, len(ids))
        yield Window(_begun(special.prefix, ids[start:stop]) if start else ids[:stop], stop - scored, stop)
        scored = stop
        if stop == len(ids):
            return


def _disjoint(special: SpecialTokens, ids: np.ndarray, length: int, first: int | None) -> Iterator[Window]:
    if first is None:
        raise DataError("The protocol disjoint scores the first token too; this tokenizer has no <s> to put before it.")
    skipped = len(special.prefix)
    text = np.concatenate([[first], special.bare(ids)])
    for scored in range(0, len(text) - 1, length):
        stop = min(scored + length, len(text) - 1)
        yield Window(text[max(0, stop - length) : stop + 1], stop - scored, stop + skipped, reads_last=False)


def _yarn(special: SpecialTokens, ids: np.ndarray, length: int, first: int | None) -> Iterator[Window]:
    skipped = len(special.prefix)
    text = special.bare(ids)
    begin = [] if first is None else [first]
    scored = 1 - len(begin)
    for start in range(0, len(text), YARN_STRIDE):
        stop = min(start + length - len(begin), len(text))
        # at lengths of 256 or less the stride skips tokens, as it does there
        targets = min(stop - scored, stop - start - 1 + len(begin))
        yield Window(np.concatenate([begin, text[start:stop]]).astype(np.int64), targets, stop + skipped)
        scored = stop
        if stop == len(text):
            return


def _begun(prefix: tuple[int, ...], ids: np.ndarray) -> np.ndarray:
    """The window with the tokenizer's own beginning in place of its first tokens.

    Models lean on their <s>: without it in every window, more context and a beginning could not be told apart.
    """
    ids = ids.copy()
    ids[: len(prefix)] = prefix
    return ids
