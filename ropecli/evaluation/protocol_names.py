"""The protocols by name, with their descriptions. Loads nothing, for the help of commands."""

from typing import NamedTuple

PASSAGE, CUE = 80, 16
"""recall: tokens of a passage, and of its beginning, which is repeated but not scored."""


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
    "recall": ProtocolDescription(
        "what a passage gains from its first occurrence, N tokens back; 1: as much as from a near one",
        f"Passages of {PASSAGE} tokens are repeated at the end of N tokens, after text of other documents. Their first "
        f"{CUE} tokens are the cue, the others are scored. far: the passages also stand near the beginning. absent: "
        "others stand there. near: they stand shortly before their repetitions, within the pretraining length. "
        "Far gain = absent − far, nats per token of one model. Recall = Σ(absent₀ − far) / Σ(absent₀ − near₀), where ₀ "
        "is the first model at a length within its pretraining length. 1: as good as a near copy in the first model; "
        "0: no better than the first model without the passage; below 0: worse. Intervals are paired by document, "
        "or by pass where that is wider. This is literal copying, the least that the use of far text needs. It is not "
        "understanding.",
    ),
}
SAME_TOKENS = ("tail", "sliding")
"""The protocols that score the same tokens at every length, so that lengths can be compared with each other."""
