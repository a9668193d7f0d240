"""RULER (Hsieh et al. 2024, arXiv:2404.06654): scores by task and length.

In the mode generate, the score is the share of the references in the answer, as published. An answer ends early once it
has all references, since more text cannot lower its score. In the mode rank, references and wrong candidates are ranked
by log-probability per token.
"""

from collections.abc import Sequence
from contextlib import suppress
from itertools import product
from typing import Any

from ropecli.errors import DataError
from ropecli.evaluation.driver import SampleId
from ropecli.evaluation.prompt_pieces import PieceTokenizer, find_frame
from ropecli.evaluation.request import RulerOptions, source_of
from ropecli.evaluation.ruler_prompts import PromptMaker
from ropecli.evaluation.ruler_tasks import TASKS, Needles, RulerTask, choose_tasks, read_essay, score_of
from ropecli.evaluation.subject import Subject, choose_lengths
from ropecli.evaluation.tasks.asking import Asking, Question
from ropecli.hashing import digest
from ropecli.live.loading import load_tokenizer
from ropecli.messages import progress_bar, warn


class Ruler(Asking):
    """maker: makes the prompts. lengths: tokens of the prompt and of what the model may generate."""

    name = "ruler"
    per_token = True

    def __init__(
        self, maker: PromptMaker, tasks: Sequence[RulerTask], lengths: Sequence[int], options: RulerOptions
    ) -> None:
        self.maker, self.tasks, self.lengths, self.options = maker, tasks, sorted(lengths), options
        self.pieces, self.frame = maker.tokenizer, maker.frame
        self.mode, self.count = options["mode"], options["samples"]
        self.text = source_of(options, options["data"])
        self.source = self.text.place

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "samples": self.count,
            "seed": self.maker.seed,
            "chat_template": self.maker.frame is not None,
            "thinking": self.options["thinking"],
            "threshold": self.options["threshold"],
            "text_column": self.text.column,
            "split": self.text.split,
        }

    def request(self) -> dict[str, Any]:
        essay = self.maker.essay.read(self.lengths[-1]) if self.maker.essay else None
        prompts = [self.maker.make(task, self.lengths[-1], 0).ids for task in self.tasks]
        chosen = {key: self.settings[key] for key in ("mode", "samples", "seed", "thinking")}
        tasks = [task.name for task in self.tasks]
        return {"prompts": digest(essay, *prompts), "tasks": tasks, "lengths": self.lengths, **chosen}

    def samples(self, *, one_pass: bool) -> list[SampleId]:
        names = [task.name for task in self.tasks]
        return list(product(names, self.lengths, [None], range(self.count)))

    def question(self, sample: SampleId) -> Question:
        task, length, _, index = sample
        prompt = self.maker.make(TASKS[task], length, index)

        def answers() -> Sequence[Any]:
            return self.maker.tokenizer.insides([f" {text}" for text in (*prompt.references, *prompt.wrong)])

        def grade(tokens: Sequence[int]) -> tuple[float, bool]:
            score = score_of(self.maker.tokenizer.text(tokens), prompt.references)
            return score, score == 1

        identity = digest(prompt.ids, prompt.references)
        right, limit = len(prompt.references), TASKS[task].generated
        return Question(prompt.ids, identity, answers, right, limit, grade, prompt.lead)


def make_ruler(scalings: Sequence[Subject], options: RulerOptions) -> tuple[Ruler, Any]:
    """The task for the scalings of a checkpoint, and its tokenizer. scalings: see make_needle."""
    tokenizer = load_tokenizer(scalings[0].checkpoint)
    pieces = PieceTokenizer(tokenizer)
    tasks = choose_tasks(options["tasks"])
    lengths = choose_lengths(options["lengths"], scalings)
    essay = None
    if any(isinstance(task, Needles) and task.haystack == "essay" for task in tasks):
        with progress_bar("reading the essay", None):
            essay = read_essay(source_of(options, options["data"]).texts(), pieces, lengths[-1])
    frame = find_frame(tokenizer, options["chat_template"], options["thinking"])
    maker = PromptMaker(pieces, frame, essay, options["seed"])
    samples = options["samples"]

    def fits_any(length: int) -> bool:
        return any(_fits(maker, task, length, samples) for task in tasks)

    lengths = choose_lengths(options["lengths"], scalings, fits_any)
    fitting = [task for task in tasks if all(_fits(maker, task, length, samples) for length in lengths)]
    missing = ", ".join(task.name for task in tasks if task not in fitting)
    if not fitting or (missing and options["tasks"]):
        raise DataError(
            f"A prompt of {lengths[0]} tokens is too short for {missing}. Set --lengths to more, or leave tasks out of "
            "--tasks."
        )
    if missing:
        warn(f"Not measured, since {lengths[0]} tokens are too short for them: {missing}.")
    return Ruler(maker, fitting, lengths, options), tokenizer


def _fits(maker: PromptMaker, task: RulerTask, length: int, samples: int) -> bool:
    """Return whether all prompts of a task fit a length."""
    with suppress(DataError):
        maker.make(task, length // 4, 0)
        return True  # other names and values never take several times as many tokens
    with suppress(DataError):
        for index in range(samples):
            maker.make(task, length, index)
        return True
    return False
