"""RULER (Hsieh et al. 2024, arXiv:2404.06654): scores by task and length.

In the mode generate, the score is the share of the references in the answer, as published. An answer ends early once it
has all references, since more text cannot lower its score. In the mode rank, references and wrong candidates are ranked
by log-probability per token.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ropecli.errors import DataError
from ropecli.evaluation.driver import SampleId
from ropecli.evaluation.lengths import Lengths
from ropecli.evaluation.prompt_pieces import PieceTokenizer, find_frame
from ropecli.evaluation.ruler_prompts import PromptMaker
from ropecli.evaluation.ruler_tasks import TASKS, Needles, RulerTask, read_essay, score_of
from ropecli.evaluation.subject import Subject
from ropecli.evaluation.tasks.asking import Asking, Question
from ropecli.evaluation.texts import source_of
from ropecli.hashing import digest
from ropecli.messages import progress_bar, warn
from ropecli.options import RulerOptions


class Ruler(Asking):
    """maker: makes the prompts. lengths: tokens of the prompt and of what the model may generate."""

    name = "ruler"
    per_token = True

    def __init__(
        self, maker: PromptMaker, tasks: Sequence[RulerTask], lengths: Sequence[int], options: RulerOptions
    ) -> None:
        self.maker, self.tasks, self.lengths, self.source = maker, tasks, sorted(lengths), options["data"]
        self.pieces, self.frame, self.seed = maker.tokenizer, maker.frame, maker.seed
        self.mode, self.count, self.parts = options["mode"], options["samples"], [task.name for task in tasks]
        keys = ("thinking", "threshold", "text_column", "split")
        self.further = {key: value for key, value in options.items() if key in keys}

    def request(self) -> dict[str, Any]:
        essay = self.maker.essay.read(self.lengths[-1]) if self.maker.essay else None
        prompts = [self.maker.make(task, self.lengths[-1], 0).ids for task in self.tasks]
        chosen = {key: self.settings[key] for key in ("mode", "samples", "seed", "thinking")}
        return {"prompts": digest(essay, *prompts), "tasks": self.parts, "lengths": self.lengths, **chosen}

    def question(self, sample: SampleId) -> Question:
        task, length, _, index = sample
        prompt = self.maker.make(TASKS[task], length, index)

        def answers() -> Sequence[Any]:
            return self.maker.tokenizer.each_inside([f" {text}" for text in (*prompt.references, *prompt.wrong)])

        def grade(tokens: Sequence[int]) -> tuple[float, bool]:
            score = score_of(self.maker.tokenizer.text(tokens), prompt.references)
            return score, score == 1

        identity = digest(prompt.ids, prompt.references)
        right, limit = len(prompt.references), TASKS[task].generated
        return Question(prompt.ids, identity, answers, right, limit, grade, prompt.lead)


def make_ruler(options: RulerOptions, tokenizer: Any, lengths: Lengths, subject: Subject) -> Ruler:
    """The task, without default lengths and tasks whose prompts do not fit. Raises DataError."""
    pieces, samples, names = PieceTokenizer(tokenizer), options["samples"], options["tasks"]
    tasks = [task for name, task in TASKS.items() if names is None or name in names]
    essay = None
    if any(isinstance(task, Needles) and task.haystack == "essay" for task in tasks):
        with progress_bar("reading the essay", None):
            essay = read_essay(source_of(options).texts(), pieces, lengths.tokens[-1])
    frame = find_frame(tokenizer, options["chat_template"], options["thinking"])
    maker = PromptMaker(pieces, frame, essay, options["seed"])
    chosen = lengths.that_fit(lambda length: any(_fits(maker, task, length, samples) for task in tasks))
    fitting = [task for task in tasks if all(_fits(maker, task, length, samples) for length in chosen)]
    missing = ", ".join(task.name for task in tasks if task not in fitting)
    if not fitting or (missing and names):
        raise DataError(
            f"A prompt of {chosen[0]} tokens is too short for {missing}. Set --lengths to more, or leave tasks out of "
            "--tasks."
        )
    if missing:
        warn(f"Not measured, since {chosen[0]} tokens are too short for them: {missing}.")
    return Ruler(maker, fitting, chosen, options)


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
