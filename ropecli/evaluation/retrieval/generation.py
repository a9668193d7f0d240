"""The key as the model says it: greedy, compared with the beginning of the answer, white space aside.

A digit after the key makes another number of it.
"""

from itertools import islice

from ropecli.evaluation.retrieval.pieces import Pieces
from ropecli.evaluation.retrieval.prompts import Prompt
from ropecli.evaluation.retrieval.ranking import Found
from ropecli.evaluation.retrieval.reading import PromptReader

_MORE = 4
"""Tokens beyond the key's own, for white space or a key put in other tokens: these stand beyond the length."""


def generate_answer(reader: PromptReader, pieces: Pieces, prompt: Prompt) -> Found:
    """Whether the answer begins with the key and goes on with no digit, or not at all. Stops once that is decided."""
    # what is left of the question where the tokenizer joins its end with the key belongs to the answer
    key = pieces.text(prompt.answers[0]).strip()
    tokens: list[int] = []
    said = ""
    for token in islice(reader.greedy(prompt.ids), len(prompt.answers[0]) + _MORE):
        tokens.append(token)
        said = pieces.text(tokens).lstrip()
        if said.startswith(key) and said != key:
            return Found(not said[len(key)].isdigit())
        if not key.startswith(said.rstrip()):
            break
    return Found(said == key)
