"""Measures how often a model finds the key: lengths × depths × trials.

mode rank: the true key is ranked among other candidates by its log-probability. Works for every causal LM, however
small or untaught. The other candidates are keys of the same form: those of the other needles in the prompt, and some
that appear nowhere in it. They have as many tokens as the true key, so that sums of log-probabilities are comparable.
Where a tokenizer has too few such numbers, sums over different numbers of tokens are compared. A tie counts against
the true key.

mode generate: the model writes the key greedily. It is compared with the beginning of the answer, white space aside. A
digit after the key makes it another number.
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
_MORE = 4
"""Tokens beyond the key's own, for white space or a key put in other tokens: these stand beyond the length."""


@dataclass(frozen=True)
class RetrievalResult:
    """cells: by length, then depth. fingerprint: sha256 of all prompts and true keys, whatever the mode.

    once: whether each prompt was read once, or for each answer anew.
    """

    cells: list[RetrievalCell]
    fingerprint: str
    once: bool


class TrialResult(NamedTuple):
    """One trial. rank: of the true key, 1 the first. margin: its log-probability less the best other's, nats."""

    hit: bool
    rank: int | None = None
    margin: float | None = None


def check_mode(mode: str) -> None:
    """Raises MethodError for an unknown mode."""
    if mode not in MODES:
        raise MethodError(f"Unknown mode {mode!r}. Known: {', '.join(MODES)}.{did_you_mean(mode, MODES)}")


def chance_of(task: RetrievalTask, mode: str) -> float:
    """Accuracy of a blind guess: one of the candidates, or any key of five digits."""
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
    """One RetrievalCell per length and depth, of `trials` prompts each.

    length: tokens of prompt and answer together, in both modes. depth: 0 puts the needle right after the introduction,
    1 right before the question. mode: 'rank' or 'generate'. switching, chunk: of PromptReader. workers: the processes
    that share the trials. advance: called after each trial of this process. say: told in a sentence what could not be
    done as asked.

    Raises MethodError for an unknown mode, DataError for a length that is too short, RopecliError for a model that
    overflows, and for a prompt that the device's memory does not hold.
    """
    check_mode(mode)
    lengths, depths = sorted(set(lengths)), sorted(set(depths))
    workers = workers or Workers()
    reader = PromptReader(model, lengths[-1], switching=switching, chunk=chunk)
    with within_memory(1, lengths[-1]):
        reader.settle(task.prompt(lengths[-1], depths[0], 0).ids, say)
    asked = list(product(lengths, depths, range(trials)))
    mine = {}
    for index in workers.share(range(len(asked))):
        prompt = task.prompt(*asked[index])
        mine[index] = (_ask(reader, task, prompt, mode), prompt.fingerprint())
        advance()
    measured = workers.gather(mine)
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
    """Raises RopecliError for a log-probability that is not finite."""
    values = reader.log_probabilities(prompt.ids, prompt.answers)
    if not np.isfinite(values).all():
        tokens = len(prompt.ids) + len(prompt.answers[0])
        raise RopecliError(
            f"A log-probability is not finite at length {tokens}: the model overflows there. Another --dtype may help."
        )
    true, others = values[0], values[1:]
    rank = 1 + int((others >= true).sum())
    return TrialResult(rank == 1, rank, float(true - others.max()))


def generate_answer(reader: PromptReader, pieces: PieceTokenizer, prompt: Prompt) -> TrialResult:
    """Whether the answer begins with the key and goes on with no digit, or not at all. Stops once that is decided."""
    # what is left of the question where the tokenizer joins its end with the key belongs to the answer
    key = pieces.text(prompt.answers[0]).strip()
    tokens: list[int] = []
    said = ""
    for token in islice(reader.greedy(prompt.ids), len(prompt.answers[0]) + _MORE):
        tokens.append(token)
        said = pieces.text(tokens).lstrip()
        if said.startswith(key) and said != key:
            return TrialResult(not said[len(key)].isdigit())
        if not key.startswith(said.rstrip()):
            break
    return TrialResult(said == key)
