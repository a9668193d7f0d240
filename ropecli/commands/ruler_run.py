"""A RULER run: makes the prompts of a checkpoint, asks its model, makes the report. Imports torch when it runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropecli.commands.messages import progress_bar, warn
from ropecli.commands.options import listed
from ropecli.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ropecli.checkpoint.opening import Checkpoint
    from ropecli.commands.subject import Subject
    from ropecli.evaluation.eval_report import RulerReport
    from ropecli.evaluation.processes import Workers
    from ropecli.evaluation.ruler.definitions import RulerTask
    from ropecli.evaluation.ruler.measure import RulerScores
    from ropecli.evaluation.ruler.prompts import PromptMaker


@dataclass(frozen=True)
class RulerChoice:
    """The options of a run. tasks: None for all that fit. questions: file by task.

    skip_short: skip lengths that are too short for every task, as without `lengths`.
    """

    data: str
    lengths: list[int] | None
    tasks: Sequence[str] | None
    samples: int
    mode: str
    chunk: int | None
    batch_size: int
    text_column: str
    split: str | None
    loading: dict[str, Any]
    questions: dict[str, Path] = field(default_factory=dict)
    chat_template: str = "auto"
    threshold: float | None = None
    seed: int = 0
    skip_short: bool = False


def choose_ruler(data: str, lengths: Sequence[int] | None, tasks: Sequence[str] | None, **others: Any) -> RulerChoice:
    """Check the options before anything is loaded. others: of RulerChoice. Raises MethodError."""
    from ropecli.evaluation.retrieval.accuracy import check_mode
    from ropecli.evaluation.ruler.definitions import choose_tasks

    wanted = None if lengths is None else sorted(set(lengths))
    choice = RulerChoice(data, wanted, None if tasks is None else listed(tasks), **others)
    check_mode(choice.mode)
    choose_tasks(choice.tasks, choice.mode, list(choice.questions))
    return choice


@dataclass(frozen=True)
class RulerRun:
    """The prompts for one checkpoint. chat: whether they use its chat template."""

    asked: RulerChoice
    maker: "PromptMaker"
    tasks: "list[RulerTask]"
    lengths: list[int]
    chat: bool

    def request(self) -> dict[str, Any]:
        """Everything that the scores depend on, next to the checkpoint and its scaling."""
        from ropecli.evaluation.eval_report import loading_request

        return {
            "prompts": self._fingerprint(),
            "tasks": [task.name for task in self.tasks],
            "lengths": self.lengths,
            "samples": self.asked.samples,
            "mode": self.asked.mode,
            "seed": self.asked.seed,
            **loading_request(self.asked.loading),
        }

    def _fingerprint(self) -> str:
        """Hash of the essay, the questions, and the first prompt of each task at the longest length."""
        import hashlib

        longest = self.lengths[-1]
        essay = self.maker.essay.read(longest) if self.maker.essay else None
        sha = hashlib.sha256(repr((essay, self.maker.questions)).encode())
        for task in self.tasks:
            sha.update(self.maker.make(task, longest, 0).ids.astype("<i8").tobytes())
        return sha.hexdigest()

    def measure(
        self,
        subject: "Subject",
        model: "PreTrainedModel",
        scores: "RulerScores",
        part: str,
        workers: "Workers",
        *,
        switching: bool,
    ) -> "RulerReport":
        """Ask the model. part: names the subject in `scores`. switching: whether frequencies depend on the length."""
        from ropecli.commands.measuring import chunk_size
        from ropecli.commands.subject import base_report
        from ropecli.evaluation.eval_report import RulerReport, weight_settings
        from ropecli.evaluation.ruler.answers import PUBLISHED, effective_length
        from ropecli.evaluation.ruler.measure import measure_ruler

        chunk = chunk_size(self.asked.chunk, self.lengths[-1])
        total = len(self.tasks) * len(self.lengths) * len(workers.share(range(self.asked.samples)))
        with progress_bar("asking", total) as step:
            result = measure_ruler(
                model,
                self.maker,
                self.tasks,
                self.lengths,
                samples=self.asked.samples,
                mode=self.asked.mode,
                batch_size=self.asked.batch_size,
                switching=switching,
                chunk=chunk,
                scores=scores,
                part=part,
                workers=workers,
                advance=step,
                say=warn,
            )
        report = RulerReport(
            **base_report(subject, self.asked.data, model),
            mode=self.asked.mode,
            settings={
                "samples": self.asked.samples,
                "seed": self.asked.seed,
                "chat_template": self.chat,
                "squad": str(self.asked.questions.get("qa_1") or "") or None,
                "hotpotqa": str(self.asked.questions.get("qa_2") or "") or None,
                "text_column": self.asked.text_column,
                "split": self.asked.split,
                "chunk": chunk,
                "batch_size": self.asked.batch_size,
                "attn": self.asked.loading["attn"],
                "prompts_read_once": result.once,
                "processes": workers.count,
                **weight_settings(self.asked.loading),
            },
            fingerprint=result.fingerprint,
            threshold=self.asked.threshold or 0.0,
            relative=self.asked.threshold is None,
            effective_length=None,
            cells=result.cells,
        )
        means = {length: report.mean(length)[0] for length in report.lengths}
        threshold = PUBLISHED * means[report.lengths[0]] if report.relative else report.threshold
        longest = effective_length(means, threshold) if report.above_chance() else None
        return replace(report, threshold=threshold, effective_length=longest)


def prepare_ruler(checkpoint: "Checkpoint", reach: tuple[int, int], asked: RulerChoice) -> "RulerRun":
    """Make a checkpoint's prompts, before its weights are loaded. reach: pretraining length and context length."""
    from ropecli.commands.measuring import default_lengths
    from ropecli.data.sources import read_texts
    from ropecli.evaluation.chat_frame import find_frame
    from ropecli.evaluation.retrieval.haystack import PieceTokenizer
    from ropecli.evaluation.ruler.definitions import Needles, Questions, choose_tasks
    from ropecli.evaluation.ruler.haystacks import Pieces, read_essay, read_questions
    from ropecli.evaluation.ruler.measure import fitting_tasks
    from ropecli.evaluation.ruler.prompts import PromptMaker
    from ropecli.live.loading import load_tokenizer

    tokenizer = load_tokenizer(checkpoint)
    pieces = PieceTokenizer(tokenizer)
    frame = find_frame(tokenizer, asked.chat_template)
    tasks = choose_tasks(asked.tasks, asked.mode, list(asked.questions))
    lengths = asked.lengths or default_lengths(*reach)
    essay = None
    if any(isinstance(task, Needles) and task.haystack == "essay" for task in tasks):
        with progress_bar("reading the essay", None):
            texts = read_texts(asked.data, text_column=asked.text_column, split=asked.split)
            essay = read_essay(texts, Pieces(pieces), lengths[-1])
    questions = {
        task.name: read_questions(asked.questions[task.name], task.source)
        for task in tasks
        if isinstance(task, Questions)
    }
    maker = PromptMaker(pieces, frame, essay, questions, asked.seed)
    if asked.lengths is None or asked.skip_short:
        lengths = [length for length in lengths if _fits(maker, tasks, length)] or lengths[-1:]
    fitting = fitting_tasks(maker, tasks, lengths, required=asked.tasks is not None)
    if missing := [task.name for task in tasks if task not in fitting]:
        warn(f"Not measured, since {lengths[0]} tokens are too short for them: {', '.join(missing)}.")
    return RulerRun(asked, maker, fitting, lengths, frame is not None)


def _fits(maker: "PromptMaker", tasks: "list[RulerTask]", length: int) -> bool:
    """Return whether any task fits this length."""
    from ropecli.evaluation.ruler.measure import fitting_tasks

    try:
        return bool(fitting_tasks(maker, tasks, [length], required=False))
    except DataError:
        return False
