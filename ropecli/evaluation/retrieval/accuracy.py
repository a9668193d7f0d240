"""Measure how often a model finds the key, by length and depth.

Mode rank: rank the true key among other candidates by log-probability. Works for every causal LM, including small base
models. The other candidates are the keys of the other needles in the prompt and keys that appear nowhere in it. They
have as many tokens as the true key, so that sums of log-probabilities are comparable, unless the tokenizer has too few
such numbers. A tie counts against the true key.

Mode generate: decode greedily. The answer must start with the key, ignoring white space. A digit after the key makes it
a different number.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ropecli.errors import MethodError, RopecliError, did_you_mean
from ropecli.evaluation.eval_report import RetrievalCell
from ropecli.evaluation.processes import Workers
from ropecli.evaluation.retrieval.haystack import PieceTokenizer
from ropecli.evaluation.retrieval.prompt_reader import PromptReader
from ropecli.evaluation.retrieval.prompts import KEY_COUNT, Prompt, RetrievalTask
from ropecli.evaluation.scoring import refuse_unknown_ids, within_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODES = ("rank", "generate")
_EXTRA_TOKENS = 4
"""Tokens generated beyond the key's own, for white space or another tokenization of the key. They exceed the length."""


@dataclass(frozen=True)
class RetrievalResult:
    """cells: by length, then depth. fingerprint: sha256 of all prompts and true keys; the same for both modes.

    once: whether each prompt was read once; otherwise, it was read again for each answer.
    """

    cells: list[RetrievalCell]
    fingerprint: str
    once: bool


class TrialResult(NamedTuple):
    """One trial. rank: rank of the true key, 1 is best. margin: its log-probability minus the best other's, nats."""

    hit: bool
    rank: int | None = None
    margin: float | None = None


def check_mode(mode: str) -> None:
    """Raise MethodError for an unknown mode."""
    if mode not in MODES:
        raise MethodError(f"Unknown mode {mode!r}. Known: {', '.join(MODES)}.{did_you_mean(mode, MODES)}")


def chance_of(task: RetrievalTask, mode: str) -> float:
    """Accuracy of random guessing: one of the candidates, or any key of five digits."""
    return 1 / task.candidates if mode == "rank" else 1 / KEY_COUNT


def evaluate_retrieval(
    model: "PreTrainedModel",
    task: RetrievalTask,
    lengths: Sequence[int],
    depths: Sequence[float],
    *,
    trials: int = 5,
    mode: str = "rank",
    switching: bool = False,
    chunk: int | None = None,
    workers: Workers | None = None,
    advance: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda message: None,
) -> RetrievalResult:
    """Measure accuracy for each length and depth, on `trials` prompts each.

    lengths: tokens of prompt and answer together, in both modes. depths: 0 puts the needle right after the
    introduction, 1 right before the question. mode: 'rank' or 'generate'. switching, chunk: see PromptReader. workers:
    the processes that share the trials. advance: called after each trial of this process. say: called with warnings.

    Raises MethodError for an unknown mode, DataError for a length that is too short, RopecliError if the model
    overflows or the device runs out of memory.
    """
    check_mode(mode)
    lengths, depths = sorted(set(lengths)), sorted(set(depths))
    workers = workers or Workers()
    reader = PromptReader(model, lengths[-1], switching=switching, chunk=chunk)
    with within_memory(1, lengths[-1]):
        reader.check_cache(task.prompt(lengths[-1], depths[0], 0).ids, say)
    asked = list(product(lengths, depths, range(trials)))
    own = {}
    for index in workers.share(range(len(asked))):
        prompt = task.prompt(*asked[index])
        own[index] = (_ask(reader, task, prompt, mode), prompt.fingerprint())
        advance()
    measured = workers.gather(own)
    found, prints = zip(*(measured[index] for index in range(len(asked))), strict=True)
    cells = [
        _cell(length, depth, found[first * trials : (first + 1) * trials])
        for first, (length, depth) in enumerate(product(lengths, depths))
    ]
    return RetrievalResult(cells, hashlib.sha256(b"".join(prints)).hexdigest(), reader.once)


def _ask(reader: PromptReader, task: RetrievalTask, prompt: Prompt, mode: str) -> TrialResult:
    largest = max(int(prompt.ids.max()), max(max(answer) for answer in prompt.answers))
    refuse_unknown_ids(largest, reader.split.model)
    with within_memory(1, len(prompt.ids)):
        return rank_answers(reader, prompt) if mode == "rank" else generate_answer(reader, task.pieces, prompt)


def _cell(length: int, depth: float, found: Sequence[TrialResult]) -> RetrievalCell:
    ranks = [one.rank for one in found if one.rank is not None]
    margins = [one.margin for one in found if one.margin is not None]
    return RetrievalCell(
        length=length,
        depth=depth,
        trials=len(found),
        hits=sum(one.hit for one in found),
        rank=float(np.mean(ranks)) if ranks else None,
        margin=float(np.mean(margins)) if margins else None,
        found=tuple(one.hit for one in found),
    )


def rank_answers(reader: PromptReader, prompt: Prompt) -> TrialResult:
    """Rank the true key among the candidates. Raises RopecliError if a log-probability is not finite."""
    values = reader.log_probabilities(prompt.ids, prompt.answers)
    if not np.isfinite(values).all():
        tokens = len(prompt.ids) + len(prompt.answers[0])
        raise RopecliError(
            f"A log-probability is not finite at length {tokens}: the model overflows. Try another --dtype."
        )
    true, others = values[0], values[1:]
    rank = 1 + int((others >= true).sum())
    return TrialResult(rank == 1, rank, float(true - others.max()))


def generate_answer(reader: PromptReader, pieces: PieceTokenizer, prompt: Prompt) -> TrialResult:
    """Generate until it is clear whether the answer starts with the key, without another digit after it."""
    # if the tokenizer merges the end of the question with the key, the merged token belongs to the answer
    key = pieces.text(prompt.answers[0]).strip()
    tokens: list[int] = []
    answer = ""
    for token in islice(reader.greedy(prompt.ids), len(prompt.answers[0]) + _EXTRA_TOKENS):
        tokens.append(token)
        answer = pieces.text(tokens).lstrip()
        if answer.startswith(key) and answer != key:
            return TrialResult(not answer[len(key)].isdigit())
        if not key.startswith(answer.rstrip()):
            break
    return TrialResult(answer == key)
