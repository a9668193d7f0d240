"""Protocols: which windows of a document the model reads, and which tokens are scored.

N is a length in tokens. Except for yarn, ppl = exp(Σ nll / Σ tokens) over all scored tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ropecli.data.documents import Document, SpecialTokens
from ropecli.errors import DataError, did_you_mean

YARN_STRIDE = 256
PASSAGE, CUE = 80, 16
"""recall: tokens of a passage, and of its beginning, which is repeated but not scored."""
YARN_NOTE = "YaRN's script: unweighted window means; not comparable with other protocols"


class ProtocolDescription(NamedTuple):
    """summary: one line, for the help. definition: the full text, for the report page."""

    summary: str
    definition: str


PROTOCOLS = {
    "prefix": ProtocolDescription(
        "the first N tokens of each document, from one pass",
        "The model reads the first N tokens of every document; each except the first is scored given all tokens before "
        "it: ppl = exp(Σ nll / Σ tokens). One pass serves all lengths, unless the frequencies depend on the length. "
        "Early tokens have little context, so perplexity tends to fall with the length even without any benefit from "
        "the scaling. Good for finding the length at which a model fails, at the lowest cost.",
    ),
    "tail": ProtocolDescription(
        "the same target tokens at every length, with up to N − 1 tokens of context",
        "The same target tokens are scored at every length: the last K tokens of each document, cut to the longest "
        "length, each with N − K to N − 1 tokens of context. ppl = exp(Σ nll / Σ tokens). Shows whether more context "
        "helps.",
    ),
    "sliding": ProtocolDescription(
        "whole documents in windows of N tokens, --stride tokens apart",
        "Windows of N tokens, S tokens apart. The first window scores all its tokens, the others their last S. So "
        "every token is scored once, with at least N − S tokens of context after the first window. "
        "ppl = exp(Σ nll / Σ tokens). Good for the perplexity of whole documents; a smaller S gives more context and "
        "takes longer. Press et al. 2022 (arXiv:2012.15409), section 2.",
    ),
    "disjoint": ProtocolDescription(
        "non-overlapping windows, like lm-eval's rolling log-likelihood",
        "Non-overlapping windows of N tokens; every token is scored once, with N/2 tokens of context on average. "
        "ppl = exp(Σ nll / Σ tokens). The same as the rolling log-likelihood of lm-evaluation-harness (with "
        "add_bos_token=False if the tokenizer would add a second <s>): the last window is extended to the left to N "
        "tokens. Good for comparisons with that tool.",
    ),
    "yarn": ProtocolDescription(
        "like YaRN's script, to compare with its tables",
        f"{YARN_NOTE}. Windows of N tokens, 256 tokens apart, each starting with a beginning-of-sequence token. "
        "ppl = exp(mean over windows of each window's mean nll), however many tokens a window scores. The same as "
        "eval/perplexity.py of github.com/jquesnelle/yarn.",
    ),
    "longppl": ProtocolDescription(
        "only the tokens that need a long context, found by --evaluator or read from --keys",
        "LongPPL: only key tokens are scored, the same ones at every length. An evaluator model found them: a long "
        "context instead of a short one raises their log-probability by more than 2 nats, and their loss with the long "
        "context is below 2 nats. Windows of N tokens, N/2 apart: the model reads all tokens before a key token, or "
        "the last N/2 to N − 1. ppl = exp(Σ nll / Σ key tokens). Shows whether a model uses its long context. "
        "Comparable only with the same evaluator. Fang et al. 2025 (arXiv:2410.23771), section 3.",
    ),
    "recall": ProtocolDescription(
        "what a passage gains from its first occurrence, N tokens back; 1: as much as from a near one",
        f"A passage of {PASSAGE} tokens is repeated at the end of N tokens, after text of other documents. Its first "
        f"{CUE} tokens are the cue, the others are scored. far: the passage also stands near the beginning. absent: "
        "another passage stands there. near: it stands shortly before its repetition, within the pretraining length. "
        "Far gain = absent − far, nats per token of one model. Recall = Σ(absent₀ − far) / Σ(absent₀ − near₀), where ₀ "
        "is the first model at a length within its pretraining length. 1: as good as a near copy in the first model; "
        "0: no better than the first model without the passage; below 0: worse. Intervals are paired by document. "
        "This is literal copying, the least that the use of far text needs. It is not understanding.",
    ),
}
SAME_TOKENS = ("tail", "sliding", "disjoint", "longppl")
"""The protocols that score the same tokens at every length, so that lengths can be compared with each other."""


@dataclass(frozen=True)
class Window:
    """One span of a document.

    ids: shape (tokens,), int64. targets: number of scored tokens, the last ones. stop: position in the document after
    the last scored token. reads_last: whether the model also reads the last token, which no target depends on. picked:
    indices of the only targets that count; None for all.
    """

    ids: np.ndarray
    targets: int
    stop: int
    reads_last: bool = True
    picked: np.ndarray | None = None

    @property
    def read(self) -> int:
        """Number of tokens that the model reads."""
        return len(self.ids) if self.reads_last else len(self.ids) - 1


@dataclass(frozen=True)
class Protocol:
    """A protocol with its settings. Raises DataError for an unknown name.

    stride: tokens between the windows of `sliding`; default: half of each length. targets: tokens that `tail` scores
    per document; default: half the shortest length.
    """

    name: str
    stride: int | None = None
    targets: int | None = None

    def __post_init__(self) -> None:
        if self.name not in PROTOCOLS:
            hint = did_you_mean(self.name, PROTOCOLS)
            raise DataError(f"Unknown protocol {self.name!r}. Known: {', '.join(PROTOCOLS)}.{hint}")

    @property
    def reads_whole_documents(self) -> bool:
        return self.name in ("sliding", "disjoint", "yarn", "recall")

    def least_tokens(self, special: SpecialTokens) -> int:
        """Tokens that a document needs, if whole documents are read."""
        return 3 * PASSAGE if self.name == "recall" else special.first_scored + 1 + len(special.suffix)

    def inserted(self, special: SpecialTokens) -> int | None:
        """The token that the protocol puts before a text; None if it adds none or the tokenizer has none."""
        if self.name == "yarn":
            return special.bos
        if self.name == "disjoint":
            return special.eos if special.bos is None else special.bos
        return None

    def for_lengths(self, lengths: list[int], special: SpecialTokens) -> "Protocol":
        """Return the protocol with stride and targets set. lengths: ascending. Raises DataError if they do not fit."""
        unscored = 1 if self.name in ("disjoint", "yarn") else special.first_scored
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
            case "disjoint":
                yield from _disjoint(special, document.ids, length, self.inserted(special))
            case "yarn":
                yield from _yarn(special, document.ids, length, self.inserted(special))
            case "longppl":
                yield from _longppl(document, special, length)


def _sliding(ids: np.ndarray, special: SpecialTokens, length: int, stride: int) -> Iterator[Window]:
    scored = special.first_scored
    for start in range(0, len(ids), stride):
        stop = min(start + length, len(ids))
        yield Window(_with_prefix(special.prefix, ids[start:stop]) if start else ids[:stop], stop - scored, stop)
        scored = stop
        if stop == len(ids):
            return


def _disjoint(special: SpecialTokens, ids: np.ndarray, length: int, first: int | None) -> Iterator[Window]:
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
        # at lengths of 256 or less the stride skips tokens, as in YaRN's script
        targets = min(stop - scored, stop - start - 1 + len(begin))
        yield Window(np.concatenate([begin, text[start:stop]]).astype(np.int64), targets, stop + skipped)
        scored = stop
        if stop == len(text):
            return


def _longppl(document: Document, special: SpecialTokens, length: int) -> Iterator[Window]:
    assert document.key_tokens is not None
    for window in _sliding(special.ended(document.ids), special, length, length // 2):
        scored = document.key_tokens - (window.stop - window.targets)
        picked = scored[(scored >= 0) & (scored < window.targets)]
        if len(picked):
            yield replace(window, picked=picked)


@dataclass(frozen=True)
class ShortContext:
    """The short context of LongPPL and LongCE (Fang et al. 2025, arXiv:2410.23771).

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
