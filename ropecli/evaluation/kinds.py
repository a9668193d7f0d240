"""The kinds of measurements: what a report of each has for numbers, tables, figures and sentences."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import takewhile
from typing import Any

import numpy as np

from ropecli.errors import DataError, RopecliError
from ropecli.evaluation.protocols import PASSAGE, SAME_TOKENS
from ropecli.evaluation.report import (
    SCHEMA_VERSION,
    Cell,
    Change,
    Reference,
    Report,
    loss_change,
    loss_difference,
)
from ropecli.evaluation.statistics import score_difference, wilson
from ropecli.evaluation.wording import RECALL_NOTE, change_words, number, recall_words
from ropecli.options import PROTOCOLS
from ropecli.table import clean

PUBLISHED = 0.856
"""RULER's threshold: the score of Llama-2-7B at 4,096 tokens over thirteen tasks (arXiv:2404.06654, section 4)."""


class PerplexityReport(Report):
    """Cells are losses. task: the protocol."""

    kind, order = "perplexity", 1
    higher, logarithmic, change_unit = False, True, "%"

    @property
    def measured_by(self) -> str:
        given = {key: self.settings.get(key) for key in ("stride", "targets")}
        settings = [f"{key} {value}" for key, value in given.items() if value is not None]
        return clean(f"protocol {self.task}" + (f" ({', '.join(settings)})" if settings else ""), 130)

    def value(self, length: int) -> float:
        return self.cells_at(length)[0].ppl

    def change_from(self, base: Any, length: int) -> Change:
        return loss_change(self.cells_at(length)[0], base.cells_at(length)[0])

    def columns(self, length: int) -> dict[str, str]:
        cell = self.cells_at(length)[0]
        return {
            "ppl": number(cell.ppl),
            "95% interval": "one document" if cell.low is None else f"{number(cell.low)} to {number(cell.high or 0)}",
            "nll (nats)": f"{cell.value:.4f}",
            "bits/byte": "unknown" if cell.bits_per_byte is None else f"{cell.bits_per_byte:.4f}",
            "tokens": f"{cell.tokens}",
            "documents": f"{cell.samples}",
        }

    def reading(self, length: int, base: Report | None) -> str:
        words = f"Perplexity at {length} tokens: {number(self.value(length))}"
        if base is None:
            return f"{words}."
        read = [each for each in base.lengths if each <= base.context_length]
        compared = read[-1] if read and self.task in SAME_TOKENS else length
        if compared in base.lengths:
            change = loss_change(self.cells_at(length)[0], base.cells_at(compared)[0])
            words += f", {change_words(change, '%')} from the base" + f" at {compared} tokens" * (compared != length)
        return f"{words}."

    def row(self, length: int) -> dict[str, Any]:
        cell = self.cells_at(length)[0]
        return {
            **{"value": cell.ppl, "low": cell.low, "high": cell.high, "n": cell.samples, "nll": cell.value},
            **{"tokens": cell.tokens, "ppl": cell.ppl, "documents": cell.samples, "bits_per_byte": cell.bits_per_byte},
        }


class RecallReport(Report):
    """Cells are the losses of the arms, see evaluation/tasks/recall.py."""

    kind = "recall"
    note = RECALL_NOTE
    reference: Reference

    @property
    def measured_by(self) -> str:
        passages, several = self.settings.get("passages_per_pass", 1), ""
        if passages > 1:
            several = f", {passages} per pass, repeated at least {min(self.settings['least_distances']):,} tokens later"
        return f"passages of {PASSAGE} tokens{several}" + ", copied greedily" * (self.mode == "generate")

    @property
    def meaning(self) -> str:
        where = f"at {self.reference.near.length} tokens in {clean(self.reference.name)}"
        return f"Recall 1: as good as a near copy {where}. 0: no better than there without the passage."

    def arm(self, name: str, length: int) -> Cell:
        return next(cell for cell in self.cells_at(length) if cell.task == name)

    def words(self, length: int) -> str:
        return recall_words(self.recall(length))

    def far_gain(self, length: int) -> Change:
        """absent − far, nats per token."""
        far = self.arm("far", length)
        return loss_difference(self.arm("absent", length), far, far.weights)

    def recall(self, length: int) -> Change:
        return self.reference.recall(self.arm("far", length))

    def reads_to(self, least: float = 0.0) -> int | None:
        """The longest length, with all shorter ones, where far gain and recall are certain: above 0 and `least`."""

        def reads(length: int) -> bool:
            gain, recall = self.far_gain(length).low, self.recall(length).low
            return gain is not None and recall is not None and gain > 0 and recall > least

        return max(takewhile(reads, self.lengths), default=None)

    def as_reference(self, *, certain: bool = True) -> Reference:
        """certain: whether a near copy must gain something certain, else DataError is raised."""
        [near] = [cell for cell in self.cells if cell.task == "near"]
        name = self.checkpoint + f", {self.label}" * (self.method != "none")
        reference = Reference(name, *self.identity, self.arm("absent", near.length), near)
        gain = loss_difference(reference.absent, near, near.weights)
        if certain and (gain.low is None or gain.low <= 0):
            interval = "" if gain.low is None else f" ({gain.low:.2f} to {gain.high:.2f})"
            raise DataError(
                f"{self.checkpoint} gains {gain.change:.2f} nats per token{interval} from a near copy at {near.length} "
                "tokens, which is not certain, so recall has no reference. More documents narrow the interval; the "
                "first checkpoint must copy text within its pretraining length."
            )
        return reference

    def value(self, length: int) -> float:
        return self.recall(length).change

    def change_from(self, base: Any, length: int) -> Change:
        return loss_difference(base.arm("far", length), self.arm("far", length), self.reference.gains)

    def columns(self, length: int) -> dict[str, str]:
        far, absent = self.arm("far", length), self.arm("absent", length)
        return {
            "recall": self.words(length),
            "far gain (nats)": recall_words(self.far_gain(length)),
            "nll, passage far": f"{far.value:.3f}",
            "nll, absent": f"{absent.value:.3f}",
            "documents": f"{far.samples}",
        }

    def ends(self) -> dict[str, str]:
        heads = {"reads far text up to": 0.0, "recall above one half up to": 0.5}
        return {head: str(self.reads_to(least) or "–") for head, least in heads.items()}

    def notes(self, *, alone: bool) -> list[str]:
        over = "documents or passes" if self.settings.get("passages_per_pass", 1) > 1 else "documents"
        return [*[self._reach()] * alone, self.meaning, f"In brackets: 95% interval over {over}."]

    def _reach(self) -> str:
        """A sentence on how far it reads."""
        reads, half = self.reads_to(), self.reads_to(0.5)
        if reads is None:
            return f"It reads no far text: at {self.lengths[0]} tokens, far gain and recall are not certainly above 0."
        above = f"up to {half}" if half else "at no length"
        return f"It reads far text up to {reads} tokens, with recall above one half {above}."

    def reading(self, length: int, base: Report | None) -> str:
        return f"Recall at {length} tokens: {self.words(length)}. {self._reach()}"

    def row(self, length: int) -> dict[str, Any]:
        far, recall, gain = self.arm("far", length), self.recall(length), self.far_gain(length)
        return {
            **{"value": recall.change, "low": recall.low, "high": recall.high, "n": far.samples, "nll": far.value},
            **{"tokens": far.tokens, "far_gain": gain.change, "far_gain_low": gain.low, "far_gain_high": gain.high},
        }

    def summary(self) -> dict[str, Any]:
        return {"reads_to": self.reads_to(), "reads_to_half": self.reads_to(0.5)}


class ScoreReport(Report):
    """Cells are scores of answers, by depth or task. mode: rank or generate."""

    kind, order = "scores", 2
    scale, places, unit, change_unit = 100.0, 1, "%", " points"
    by_row, samples_are = True, "prompt"

    @property
    def title(self) -> str:
        return clean(self.task, 40)

    @property
    def measured_by(self) -> str:
        return "answers generated" if self.mode == "generate" else "answers ranked among candidates"

    def mean(self, length: int) -> float:
        """Mean score over tasks and depths."""
        cells = self.cells_at(length)
        return sum(cell.value for cell in cells) / len(cells)

    def interval(self, length: int) -> tuple[float, float]:
        """Wilson's 95% interval of the mean score."""
        samples = self.samples(length)
        return wilson(self.mean(length) * samples, samples)

    def chance(self, length: int) -> float:
        chances = [cell.chance or 0.0 for cell in self.cells_at(length)]
        return sum(chances) / len(chances)

    def words(self, length: int) -> str:
        low, high = (100 * end for end in self.interval(length))
        return f"{100 * self.mean(length):.1f}% ({low:.0f} to {high:.0f})"

    def value(self, length: int) -> float:
        return 100 * self.mean(length)

    def samples(self, length: int) -> int:
        return sum(cell.samples for cell in self.cells_at(length))

    @property
    def all_samples(self) -> int:
        return sum(cell.samples for cell in self.cells)

    def change_from(self, base: Any, length: int) -> Change:
        if not self.is_comparable(base):
            raise RopecliError("Cannot compare scores of different prompts.")
        scores, others = (np.concatenate([cell.sums for cell in each.cells_at(length)]) for each in (self, base))
        return Change(*score_difference(scores - others))

    def notes(self, *, alone: bool) -> list[str]:
        """Answers in which a thought stands, or thoughts that were cut."""
        thoughts, limit = sum(cell.thoughts for cell in self.cells), self.settings.get("thinking")
        of_all = f"{thoughts} of {self.all_samples}"
        if thoughts and limit not in (None, "off"):
            return [f"{of_all} thoughts did not end within {limit} tokens and were cut. Use a larger --thinking."]
        remedy = "Use --thinking off, or --thinking 2k for a thought of up to 2k tokens before the answer."
        return [f"{of_all} answers have a thought (<think>), which is scored as the answer. {remedy}"] * bool(thoughts)

    def reading(self, length: int, base: Report | None) -> str:
        return " ".join([f"Score of {self.title} at {length} tokens: {self.words(length)}.", *self.conclusions()[:1]])

    def row(self, length: int) -> dict[str, Any]:
        low, high = self.interval(length)
        values = {"value": self.mean(length), "low": low, "high": high, "n": self.samples(length)}
        return {**values, "chance": self.chance(length)}


class RulerReport(ScoreReport):
    """Has an effective length."""

    @property
    def title(self) -> str:
        return "RULER"

    @property
    def threshold(self) -> float:
        """Mean score that the effective length requires; by default, a share of the score at the shortest length."""
        given = self.settings.get("threshold")
        return PUBLISHED * self.mean(self.lengths[0]) if given is None else float(given)

    def above_chance(self) -> bool:
        """Whether the score at the shortest length is above that of guessing, by its 95% interval."""
        shortest = self.lengths[0]
        # without a hit, the interval's lower end is only 0 up to rounding
        return self.mean(shortest) > 0 and self.interval(shortest)[0] > self.chance(shortest)

    @property
    def effective_length(self) -> int | None:
        """Tokens; None if no length reaches the threshold, or the shortest one's score is not above guessing."""
        passed = list(takewhile(lambda length: self.mean(length) >= self.threshold, self.lengths))
        return passed[-1] if passed and self.above_chance() else None

    def conclusions(self) -> list[str]:
        """The effective length, and why the scores are not those of published tables."""
        shortest, longest, effective = self.lengths[0], self.lengths[-1], self.effective_length
        needed = f"{100 * self.threshold:.1f}% on average"
        if self.settings.get("threshold") is None:
            needed += f", 85.6% of the score at {shortest} tokens"
        length = f"{effective} tokens" if effective else f"below {shortest} tokens"
        if effective == longest:
            length = f"at least {longest} tokens, the longest length"
        reasons = ["the essay is the demo's text"] * (self.source == "demo")
        tasks = len({cell.task for cell in self.cells})
        reasons += [*["answers were ranked"] * (self.mode == "rank"), f"{tasks} of 13 tasks"]
        sentences = [f"Effective length: {length} (required: {needed})."]
        if not self.above_chance():
            sentences = [
                f"Effective length: none, because the score at {shortest} tokens, {self.words(shortest)}, "
                f"is not above that of guessing, {100 * self.chance(shortest):.0f}%."
            ]
            if self.mode == "generate" and not any(cell.thoughts for cell in self.cells):
                sentences += ["For a base model, use --mode rank."]
        return [*sentences, f"Not comparable with published tables: {'; '.join(reasons)}."]

    def summary(self) -> dict[str, Any]:
        return {"threshold": self.threshold, "effective_length": self.effective_length}


KINDS: dict[str, type[Report]] = {
    **dict.fromkeys(PROTOCOLS, PerplexityReport),
    "recall": RecallReport,
    "needle": ScoreReport,
    "ruler": RulerReport,
}
"""The kind of each task's report."""


def as_json(reports: Sequence[Report]) -> dict[str, Any]:
    """The content of a file of reports. Their rows have the change from the first report of the same data."""
    values = [report.as_json() for report in reports]
    for value, report in zip(values, reports, strict=True):
        base = next(other for other in reports if report.is_comparable(other))
        for row in value["rows"] if report is not base else ():
            if change := report.change_at(base, row["length"]):
                row["change"] = asdict(change)
    return {"schema_version": SCHEMA_VERSION, "reports": values}
