"""Protocols: which windows of a document the model reads, and which tokens are scored.

N is a length in tokens. ppl = exp(Σ nll / Σ tokens) over all scored tokens.

- prefix: the first N tokens of every document; each but the first is scored given all tokens before it. Early tokens
  have little context, so perplexity tends to fall with the length even without any benefit from the scaling.
- tail: the last K tokens of each document, cut to the longest length, each with N − K to N − 1 tokens of context.
- sliding: windows of N tokens, S tokens apart. The first window scores all its tokens, the others their last S: Press
  et al. 2022 (arXiv:2012.15409), section 2.
- recall: see tasks/recall.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ropecli.data.documents import Document, SpecialTokens
from ropecli.errors import DataError

PASSAGE, CUE = 80, 16
"""recall: tokens of a passage, and of its beginning, which is repeated but not scored."""
SAME_TOKENS = ("tail", "sliding")
"""The protocols that score the same tokens at every length, so that lengths can be compared with each other."""


@dataclass(frozen=True)
class Window:
    """One span of a document.

    ids: shape (tokens,), int64; the model reads all of them. targets: number of scored tokens, the last ones. stop:
    position in the document after the last scored token.
    """

    ids: np.ndarray
    targets: int
    stop: int

    @property
    def scored(self) -> np.ndarray:
        """Whether each token is scored; shape (tokens,), bool."""
        return np.arange(len(self.ids)) >= len(self.ids) - self.targets


@dataclass(frozen=True)
class Protocol:
    """A protocol with its settings. name: of PROTOCOLS.

    stride: tokens between the windows of `sliding`; default: half of each length. targets: tokens that `tail` scores
    per document; default: half the shortest length.
    """

    name: str
    stride: int | None = None
    targets: int | None = None

    @property
    def reads_whole_documents(self) -> bool:
        return self.name in ("sliding", "recall")

    def least_tokens(self, special: SpecialTokens) -> int:
        """Tokens that a document needs, if whole documents are read."""
        return 3 * PASSAGE if self.name == "recall" else special.first_scored + 1 + len(special.suffix)

    def for_lengths(self, lengths: list[int], special: SpecialTokens) -> "Protocol":
        """Return the protocol with stride and targets set. lengths: ascending. Raises DataError if they do not fit."""
        unscored = special.first_scored
        if not lengths or lengths[0] <= unscored:
            raise DataError(
                f"The lengths are {lengths}; expected at least {unscored + 1} tokens, so that one can be scored."
            )
        room = lengths[0] - unscored
        half = lengths[0] // 2
        stride = half if self.name == "sliding" and self.stride is None else self.stride
        targets = half if self.name == "tail" and self.targets is None else self.targets
        for value, what in ((stride, "A stride of {} tokens does"), (targets, "{} target tokens do")):
            if value is not None and not 0 < value <= room:
                raise DataError(f"{what.format(value)} not fit length {lengths[0]}; expected 1 to {room} tokens.")
        return Protocol(self.name, self.stride, targets)

    def windows(self, document: Document, special: SpecialTokens, length: int, longest: int) -> Iterator[Window]:
        """The windows of one document at one length. longest: the longest length of the evaluation."""
        match self.name:
            case "prefix":
                yield Window(document.ids[:length], length - special.first_scored, length)
            case "tail":
                ids = _with_prefix(special.prefix, document.ids[longest - length : longest])
                yield Window(ids, self.targets or 0, longest)
            case "sliding":
                yield from _sliding(special.ended(document.ids), special, length, self.stride or length // 2)


def _sliding(ids: np.ndarray, special: SpecialTokens, length: int, stride: int) -> Iterator[Window]:
    scored = special.first_scored
    for start in range(0, len(ids), stride):
        stop = min(start + length, len(ids))
        yield Window(_with_prefix(special.prefix, ids[start:stop]) if start else ids[:stop], stop - scored, stop)
        scored = stop
        if stop == len(ids):
            return


@dataclass(frozen=True)
class ShortContext:
    """The short context of LongCE (Fang et al. 2025, arXiv:2410.23771).

    tokens: minimum number of tokens before a scored one. stride: number of tokens that one window scores, the last
    ones.
    """

    tokens: int
    stride: int

    @property
    def first(self) -> int:
        """Position of the first scored token. The context of earlier ones is short anyway."""
        return self.tokens + self.stride

    def windows(self, length: int) -> Iterator[tuple[int, int]]:
        """(start, stop) of each window over `length` tokens. Scored are the tokens from start + self.tokens on."""
        for start in range(self.stride, length - self.tokens, self.stride):
            yield start, min(start + self.first, length)


def short_context(pretraining_length: int) -> ShortContext:
    """The paper's 4,096 tokens, a quarter of it apart; the pretraining length of a model with a shorter one."""
    tokens = min(4096, pretraining_length)
    return ShortContext(tokens, max(1, tokens // 4))


def _with_prefix(prefix: tuple[int, ...], ids: np.ndarray) -> np.ndarray:
    """Replace the first tokens of the window by the tokenizer's prefix.

    Models rely on their <s>. Without it in every window, its effect would be mixed with that of more context.
    """
    ids = ids.copy()
    ids[: len(prefix)] = prefix
    return ids
