"""What each protocol reads and scores, described once: for the help, the report page and whoever reads protocols.py.

N is a length, T the tokens of a document. But for yarn, ppl = exp(Σ nll / Σ tokens), all scored tokens alike.
"""

from typing import NamedTuple

YARN_NOTE = "YaRN's script: unweighted window means; not comparable with other protocols"


class ProtocolDescription(NamedTuple):
    """summary: for the help. definition: in full."""

    summary: str
    definition: str


PROTOCOLS = {
    "prefix": ProtocolDescription(
        "the first N tokens of each document, from one pass",
        "The first N tokens of every document are read, and each but the first is scored with all that stands before "
        "it: ppl = exp(Σ nll / Σ tokens). One pass serves all lengths, unless the frequencies switch with the length. "
        "Early tokens have little context, so longer lengths look better of themselves; a collapse beyond the "
        "pretraining length shows plainly. Good for seeing where a model fails, at the least cost.",
    ),
    "tail": ProtocolDescription(
        "the same target tokens, read with N tokens of context each",
        "The same target tokens are scored at every length: the last K of each document's longest prefix, read with "
        "the N − K to N − 1 tokens before them. ppl = exp(Σ nll / Σ tokens). Tells whether more context helps.",
    ),
    "sliding": ProtocolDescription(
        "whole documents by windows of N, --stride apart",
        "Windows of N tokens, S apart; of each the last S tokens are scored (of the first one all), so that every "
        "token is scored once, with at least N − S before it. ppl = exp(Σ nll / Σ tokens). Good for the perplexity of "
        "a whole text; the smaller S, the better and the slower. Press et al. 2022 (arXiv:2012.15409), section 2.",
    ),
    "disjoint": ProtocolDescription(
        "windows side by side, as lm-eval's rolling likelihood",
        "Windows of N tokens side by side; every token is scored once, with N/2 before it on average. "
        "ppl = exp(Σ nll / Σ tokens). The rolling log-likelihood of lm-evaluation-harness (with add_bos_token=False "
        "where the tokenizer would put a second <s>), whose last window reaches back to be full. Good for numbers to "
        "hold against that tool's.",
    ),
    "yarn": ProtocolDescription(
        "as YaRN's script, for its tables alone",
        f"{YARN_NOTE}. Windows of N tokens, 256 apart, a beginning-of-sequence token before each, and "
        "ppl = exp(mean over windows of each window's mean nll), whatever the windows' tokens. What eval/perplexity.py "
        "of github.com/jquesnelle/yarn computes.",
    ),
}
