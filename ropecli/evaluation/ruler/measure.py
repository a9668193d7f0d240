"""Ask a model RULER's tasks: scores by task, length and sample.

Mode generate: greedy decoding, scored as published by the share of the references in the answer. An answer ends early
once it has all references, since more text cannot lower its score.

Mode rank: the references are ranked among wrong candidates by their log-probability per token; the score is the share
of them among the best. Works for base models that follow no instruction.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ropecli.errors import DataError, RopecliError
from ropecli.evaluation.eval_report import RulerCell
from ropecli.evaluation.processes import Workers
from ropecli.evaluation.retrieval.prompt_reader import PromptReader
from ropecli.evaluation.ruler.answers import score_of, score_of_ranks
from ropecli.evaluation.ruler.definitions import Questions, RulerTask
from ropecli.evaluation.ruler.prompts import PromptMaker, RulerPrompt
from ropecli.evaluation.scoring import refuse_unknown_ids, within_memory
from ropecli.resume import append_record, read_records

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Asked = tuple[str, int, int]
"""Task, length, index of the sample."""


class RulerScores:
    """Scores by part, task, length and sample. folder: where they are saved; None: only in memory.

    part: one of the checkpoints that a run measures.
    """

    def __init__(self, folder: Path | None = None, rank: int = 0) -> None:
        self._found: dict[tuple[str, str, int, int], tuple[float, float | None, str]] = {}
        self._file = folder / f"samples-{rank}.jsonl" if folder else None
        for path in sorted(folder.glob("samples-*.jsonl")) if folder else []:
            for part, task, length, index, *values in read_records(path):
                self._found[part, task, length, index] = tuple(values)  # type: ignore[assignment]

    def of(self, part: str) -> dict[Asked, tuple[float, float | None, str]]:
        """(score, chance, sha256 of the prompt) of one part."""
        return {tuple(key): value for (name, *key), value in self._found.items() if name == part}  # type: ignore[misc]

    def add(self, part: str, asked: Asked, score: float, chance: float | None, digest: str) -> None:
        self._found[(part, asked[0], asked[1], asked[2])] = (score, chance, digest)
        if self._file:
            append_record(self._file, [part, *asked, score, chance, digest])


@dataclass(frozen=True)
class RulerResult:
    """fingerprint: sha256 of all prompts. once: whether each prompt was read once."""

    cells: list[RulerCell]
    fingerprint: str
    once: bool


def fitting_tasks(
    maker: PromptMaker, tasks: Sequence[RulerTask], lengths: Sequence[int], *, required: bool
) -> list[RulerTask]:
    """The tasks whose prompts fit all lengths. required: raise DataError for the others instead."""
    found = []
    for task in tasks:
        try:
            for length in lengths:
                maker.make(task, length, 0)
            found.append(task)
        except DataError:
            if required:
                raise
    if not found:
        raise DataError(f"A prompt of {min(lengths)} tokens is too short for every task. Set --lengths to more.")
    return found


def measure_ruler(
    model: "PreTrainedModel",
    maker: PromptMaker,
    tasks: Sequence[RulerTask],
    lengths: Sequence[int],
    *,
    samples: int,
    mode: str,
    batch_size: int = 1,
    switching: bool = False,
    chunk: int | None = None,
    scores: RulerScores | None = None,
    part: str = "",
    workers: Workers | None = None,
    advance: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda message: None,
) -> RulerResult:
    """Score each task at each length on `samples` prompts.

    lengths: tokens of the prompt and of what the model may generate. mode: rank or generate. batch_size: prompts to
    generate for at once. switching, chunk: see PromptReader. scores, part: where samples are saved; saved ones are not
    asked again. workers: the processes that share the samples. advance: called after each sample of this process. say:
    called with warnings. Raises DataError, RopecliError.
    """
    workers, scores = workers or Workers(), scores or RulerScores()
    reader = PromptReader(model, max(lengths), switching=switching, chunk=chunk)
    with within_memory(1, max(lengths)):
        reader.check_cache(maker.make(tasks[0], max(lengths), 0).ids, say)
    done = scores.of(part)
    for task in tasks:
        for length in sorted(lengths):
            own = workers.share(range(samples))
            for _ in set(own) & {index for name, at, index in done if (name, at) == (task.name, length)}:
                advance()
            todo = [index for index in own if (task.name, length, index) not in done]
            size = batch_size if mode == "generate" else 1
            for start in range(0, len(todo), size):
                indices = todo[start : start + size]
                prompts = [maker.make(task, length, index) for index in indices]
                for index, prompt, score in zip(
                    indices, prompts, _ask(reader, maker, task, prompts, mode), strict=True
                ):
                    chance = _chance(prompt) if mode == "rank" else None
                    scores.add(part, (task.name, length, index), score, chance, _digest(prompt))
                    advance()
    return _result(scores.of(part), tasks, lengths, samples, reader.once, workers)


def _result(
    found: dict[Asked, tuple[float, float | None, str]],
    tasks: Sequence[RulerTask],
    lengths: Sequence[int],
    samples: int,
    once: bool,
    workers: Workers,
) -> RulerResult:
    order = [(task.name, length, index) for task in tasks for length in sorted(lengths) for index in range(samples)]
    measured = workers.gather({place: found[asked] for place, asked in enumerate(order) if asked in found})
    cells = []
    for start in range(0, len(order), samples):
        scores, chances, _ = zip(*(measured[place] for place in range(start, start + samples)), strict=True)
        chance = None if chances[0] is None else float(np.mean(chances))
        name, length, _ = order[start]
        cells.append(RulerCell(name, length, tuple(scores), chance))
    digests = "".join(measured[place][2] for place in range(len(order)))
    return RulerResult(cells, hashlib.sha256(digests.encode()).hexdigest(), once)


def _chance(prompt: RulerPrompt) -> float:
    return len(prompt.references) / (len(prompt.references) + len(prompt.others))


def _digest(prompt: RulerPrompt) -> str:
    text = prompt.ids.astype("<i8").tobytes() + repr(prompt.references).encode()
    return hashlib.sha256(text).hexdigest()


def _ask(
    reader: PromptReader, maker: PromptMaker, task: RulerTask, prompts: Sequence[RulerPrompt], mode: str
) -> list[float]:
    refuse_unknown_ids(max(int(prompt.ids.max()) for prompt in prompts), reader.split.model)
    with within_memory(len(prompts), len(prompts[0].ids)):
        if mode == "rank":
            return [rank(reader, maker, prompt) for prompt in prompts]
        return generate(reader, maker, task, prompts)


def rank(reader: PromptReader, maker: PromptMaker, prompt: RulerPrompt) -> float:
    """Share of the references among the best candidates, by log-probability per token. Raises RopecliError."""
    answers = maker.pieces.several([f" {text}" for text in (*prompt.references, *prompt.others)])
    values = reader.log_probabilities(prompt.ids, answers)
    if not np.isfinite(values).all():
        raise RopecliError(
            f"A log-probability is not finite at length {len(prompt.ids)}: the model overflows. Try another --dtype."
        )
    return score_of_ranks(values / [len(answer) for answer in answers], len(prompt.references))


def generate(reader: PromptReader, maker: PromptMaker, task: RulerTask, prompts: Sequence[RulerPrompt]) -> list[float]:
    """Scores of the greedy answers to prompts of the same length."""
    any_of = isinstance(task, Questions)
    ends = _end_tokens(reader.split.model)
    answers: list[list[int]] = [[] for _ in prompts]
    ended = [False] * len(prompts)
    scores = [0.0] * len(prompts)
    for chosen in islice(reader.greedy_batch(np.stack([prompt.ids for prompt in prompts])), task.generated):
        for row, token in enumerate(chosen.tolist()):
            if ended[row]:
                continue
            if token in ends:
                ended[row] = True
                continue
            answers[row].append(token)
            text = maker.tokenizer.text(answers[row])
            scores[row] = score_of(text, prompts[row].references, any_of=any_of)
            ended[row] = scores[row] == 1
        if all(ended):
            break
    return scores


def _end_tokens(model: Any) -> set[int]:
    end = model.generation_config.eos_token_id if model.generation_config else None
    return {end} if isinstance(end, int) else set(end or ())
