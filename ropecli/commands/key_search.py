"""Shared by `passkey` and `needle`: options, run and report. Imports torch when it runs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropecli.commands.messages import progress_bar, warn
from ropecli.commands.options import SearchOptions, optional_path
from ropecli.commands.outputs import refuse_outputs
from ropecli.errors import MethodError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ropecli.commands.subject import Subject
    from ropecli.evaluation.eval_report import RetrievalReport
    from ropecli.evaluation.processes import Workers
    from ropecli.evaluation.retrieval.accuracy import RetrievalResult
    from ropecli.evaluation.retrieval.haystack import PieceTokenizer
    from ropecli.evaluation.retrieval.prompts import RetrievalTask

_CANDIDATES = 10


@dataclass(frozen=True)
class KeySearch:
    """The options of a search.

    lengths: tokens; empty until `at` fills in the default ones. depths: 0 to 1. chunk: tokens; None for the default.
    """

    lengths: list[int]
    depths: list[float]
    trials: int
    seed: int
    mode: str
    candidates: int
    chunk: int | None
    output: Path | None
    plot: Path | None
    default_lengths: bool = False

    def at(self, subject: "Subject") -> "KeySearch":
        """With the default lengths of this checkpoint, unless the user gave others."""
        from ropecli.commands.measuring import default_lengths

        return self if self.lengths else replace(self, lengths=default_lengths(*subject.reach), default_lengths=True)

    def with_room(self, task: "RetrievalTask") -> "KeySearch":
        """Without default lengths that are too short for the task. Raises DataError for such a length of the user's."""
        if not self.default_lengths:
            task.check_room(self.lengths, self.depths, self.trials)
            return self
        shortest = next(
            (length for length in self.lengths[:-1] if task.has_room(length, self.depths, self.trials)),
            self.lengths[-1],
        )
        task.check_room([shortest], self.depths, self.trials)
        return replace(self, lengths=[length for length in self.lengths if length >= shortest])

    def run(
        self,
        subject: "Subject",
        source: str,
        make_task: "Callable[[PieceTokenizer], RetrievalTask]",
        settings: Mapping[str, Any],
        **loading: Any,
    ) -> "RetrievalReport":
        """Measure and write the report.

        make_task: makes the task from the tokenizer. settings: the task's settings, for the report. loading: see
        load_model. Of several processes, only the first writes.
        """
        from ropecli.commands.measuring import interruptible
        from ropecli.commands.subject import load, refuse_attention
        from ropecli.evaluation.eval_report import weight_settings, write_report
        from ropecli.evaluation.processes import join_workers
        from ropecli.evaluation.retrieval.haystack import PieceTokenizer
        from ropecli.live.loading import load_tokenizer

        for warning in subject.warnings:
            warn(warning)
        refuse_attention(subject.checkpoint, subject.plan, loading["attn"])
        tokenizer = load_tokenizer(subject.checkpoint)
        task = make_task(PieceTokenizer(tokenizer))
        search = self.with_room(task)  # before the weights are loaded
        workers = join_workers()
        model = load(subject.checkpoint, tokenizer, **loading)
        with interruptible(None):
            result = search._measure(subject, task, model, workers)
        settings = {**settings, "attn": loading["attn"], "processes": workers.count, **weight_settings(loading)}
        report = search._report(subject, source, task, model, result, settings)
        if workers.first and self.output:
            write_report(self.output, report.as_json())
        if workers.first and self.plot:
            from ropecli.reporting.plot_kinds import draw_reports

            draw_reports([report], self.plot)
        return report

    def _measure(
        self, subject: "Subject", task: "RetrievalTask", model: "PreTrainedModel", workers: "Workers"
    ) -> "RetrievalResult":
        from ropecli.commands.measuring import chunk_size
        from ropecli.evaluation.retrieval.accuracy import evaluate_retrieval

        switching = subject.patch(model)
        prompts = range(len(self.lengths) * len(self.depths) * self.trials)
        with progress_bar("asking", len(workers.share(prompts))) as step:
            return evaluate_retrieval(
                model,
                task,
                self.lengths,
                self.depths,
                trials=self.trials,
                mode=self.mode,
                switching=switching,
                chunk=chunk_size(self.chunk, self.lengths[-1]),
                workers=workers,
                advance=step,
                say=warn,
            )

    def _report(
        self,
        subject: "Subject",
        source: str,
        task: "RetrievalTask",
        model: "PreTrainedModel",
        result: "RetrievalResult",
        settings: Mapping[str, Any],
    ) -> "RetrievalReport":
        from ropecli.commands.measuring import chunk_size
        from ropecli.commands.subject import base_report
        from ropecli.evaluation.eval_report import RetrievalReport
        from ropecli.evaluation.retrieval.accuracy import chance_of

        return RetrievalReport(
            **base_report(subject, source, model),
            task=task.name,
            mode=self.mode,
            settings={
                "introduction": task.templates.introduction,
                "needle": task.templates.needle,
                "question": task.templates.question,
                "keys": task.keys,
                "candidates": task.candidates if self.mode == "rank" else None,
                "trials": self.trials,
                "seed": task.seed,
                "chunk": chunk_size(self.chunk, self.lengths[-1]),
                "chat_template": task.frame is not None,
                "prompts_read_once": result.once,
                **settings,
            },
            fingerprint=result.fingerprint,
            chance=chance_of(task, self.mode),
            cells=result.cells,
        )


def make_search(options: SearchOptions, keys: int = 1) -> KeySearch:
    """Check the options before anything is loaded. Raises MethodError, OutputError."""
    from ropecli.evaluation.retrieval.accuracy import check_mode
    from ropecli.reporting.figures.style import refuse_unknown_ending

    mode, candidates = options["mode"], options["candidates"]
    check_mode(mode)
    if mode == "generate":
        if candidates is not None:
            raise MethodError("--candidates has no effect with --mode generate. Remove it.")
        candidates = keys + 1  # the smallest number that a task accepts
    candidates = _CANDIDATES if candidates is None else candidates
    picture, report_file = optional_path(options["plot"]), optional_path(options["output"])
    refuse_unknown_ending(picture)
    refuse_outputs(report_file, picture)
    return KeySearch(
        sorted(set(options["lengths"] or ())),
        sorted({depth + 0.0 for depth in options["depths"]}),
        options["samples"],
        options["seed"],
        mode,
        candidates,
        options["chunk"],
        report_file,
        picture,
    )
