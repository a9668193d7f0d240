"""The answer to "which method?": one verdict and one table of all tasks, joined by subject.

Recall decides before perplexity, and that before scores. Paired 95% intervals decide: a method is the best if every
other is certainly worse, or not certainly worse but certainly costs more at short context.
"""

from collections.abc import Sequence
from functools import cached_property

from ropecli.errors import MethodError, shortened
from ropecli.evaluation.kinds import PerplexityReport
from ropecli.evaluation.report import Change
from ropecli.evaluation.verdict import are_few, certain_sign, decide
from ropecli.evaluation.wording import change_words
from ropecli.reporting.lines import BEST_NOTE, Line, base_of, lengths_of, level_lines, ranked
from ropecli.scaling.registry import find_method
from ropecli.table import Bold, Table, clean

_MOST_ROWS = 6


class Summary:
    """sets: all of a page. lines: those of the set that decides, at `length`, the longest one that it compares at."""

    def __init__(self, sets: Sequence[Sequence[Line]]) -> None:
        self.sets = sorted(map(list, sets), key=lambda lines: (lines[0].report.order, -len(lines)))
        self.lines = self.sets[0]
        self.length = _longest(self.lines)
        costs = [lines for lines in self.sets if isinstance(lines[0].report, PerplexityReport) and _short(lines)]
        # of most of the models that are compared
        self._costs = max(costs, key=lambda lines: sum(_of(line, lines) is not None for line in self.lines), default=[])

    @cached_property
    def best(self) -> tuple[Line, list[Line]]:
        """The best line, and those that may be as good."""
        return self._decide(ranked(self.lines, self.length))

    def _decide(self, lines: Sequence[Line]) -> tuple[Line, list[Line]]:
        """lines: best first."""
        samples = lines[0].report.samples(self.length)
        first, *others = decide(
            lines, samples, lambda line, best: line.certainly_worse(best, self.length), self._costs_more
        )
        return first, others

    def _costs_more(self, line: Line, other: Line) -> bool:
        """Whether a line certainly costs more at short context."""
        measured, compared = (_of(each, self._costs) for each in (line, other))
        return bool(measured and compared and measured.certainly_worse(compared, _short(self._costs)))

    def cost(self, line: Line) -> Change | None:
        """The change of perplexity from the base, at the longest length that the base was pretrained to read."""
        measured = _of(line, self._costs)
        if measured is None or measured.is_base:
            return None
        return measured.change_from(base_of(self._costs), _short(self._costs))

    def sentences(self) -> list[str]:
        """The verdict: the best line, what it costs and reads, and the best one that needs no ropecli."""
        best, others = self.best
        samples, names = best.report.samples(self.length), shortened(", ".join(line.name for line in others), 200)
        if len(self.lines) == 1:
            return [f"{best.name}: {self._reading(best)}"]
        if are_few(samples):
            head = f"Too few {best.report.samples_are}s to tell ({samples}): {best.name} leads at {self.length} tokens."
        elif others:
            head = (
                f"No method is certainly best. {best.name} leads at {self.length} tokens; not certainly worse: {names}."
            )
        elif len(ranked(self.lines, self.length)) == 1:
            head = f"Only {best.name} was measured at {self.length} tokens."
        elif best.is_base:
            return ["No method is certainly better than the base."]
        else:
            head = f"Best: {best.name}."
        words = " ".join(filter(None, [self._cost_words(best), self._reading(best)]))
        return [head, words, *self._stock(best)]

    def _cost_words(self, line: Line) -> str:
        change, short = self.cost(line), _short(self._costs)
        if change is None:
            return ""
        where, words = f"at {short} tokens", change_words(change, "%")
        measured = _of(line, self._costs)
        match certain_sign(change, measured.report.samples(short) if measured else 0):
            case None:
                return f"Perplexity {where} changes by {words}."
            case 0:
                return f"It costs nothing measurable {where}: {words}."
            case sign:
                return f"It {'costs' if sign > 0 else 'gains'} {words} {where}."

    def _reading(self, line: Line) -> str:
        """What the line reads at the longest length."""
        base = base_of(self.lines)
        return line.report.reading(self.length, base.report if base and not line.is_base else None)

    def _stock(self, best: Line) -> list[str]:
        """The best line that needs no ropecli, if the best one does."""
        if best.is_base or runs_in(best) != "ropecli":
            return []
        others = [line for line in ranked(self.lines, self.length) if runs_in(line) == "stock"]
        if all(line.is_base for line in others):
            return ["It needs ropecli; no other method was measured."]
        line, equal = self._decide(others)
        words = "leading" if equal or are_few(line.report.samples(self.length)) else "best"
        name = "no method is better than the base" if line.is_base else line.name
        return [f"It needs ropecli; {words} in stock software: {name}."]

    def rows(self) -> list[Line]:
        """The lines that are compared, the best first and the base last; no more than six."""
        lines = list(dict.fromkeys([self.best[0], *ranked(self.lines, self.length), *self.lines]))
        base = [line for line in lines if line.is_base]
        shown = [line for line in lines if not line.is_base]
        stock = next((line for line in shown if runs_in(line) == "stock"), None)
        kept = shown[: _MOST_ROWS - len(base)]
        if stock and stock not in kept:
            kept[-1] = stock
        return kept + base

    def table(self) -> Table:
        rows, short, (leader, others) = self.rows(), _short(self._costs), self.best
        certain = not others and len(self.lines) > 1
        names: list[str] = [Bold(line.name) if certain and line is leader else line.name for line in rows]
        columns: list[tuple[str, list[str]]] = [("", names)]
        costs = [self.cost(line) for line in rows]
        if any(costs):
            columns.append((f"cost at {short}", ["–" if cost is None else change_words(cost, "%") for cost in costs]))
        counts, marked, folded = [], False, False
        for lines in self.sets:
            # that of the verdict, if the set has it
            length = self.length if ranked(lines, self.length) else _longest(lines)
            task = _column(lines, self.sets)
            best, of_rows = level_lines(lines, length), [_of(line, lines) for line in rows]
            texts = [line.shown(length, line.report.unit) if line else "–" for line in of_rows]
            compared = [text != "–" for text, row in zip(texts, rows, strict=True) if not row.is_base]
            if texts[0] == "–" and 2 * sum(compared) < len(compared):  # neither the best nor half of the others
                folded = True
                continue
            marked |= bool(best)
            cells = [Bold(text) if line in best else text for line, text in zip(of_rows, texts, strict=True)]
            columns.append((f"{task} at {length}", cells))
            few = " (few)" * are_few(ranked(lines, length)[0].report.samples(length))
            counts.append(f"{task}: {lines[0].report.counted}{few}")
        columns.append(("runs in", [runs_in(line) for line in rows]))
        subjects = {line.report.identity for lines in self.sets for line in lines}
        notes = ["; ".join(counts)]
        if folded or len(subjects) > len(rows):
            notes.insert(0, f"{len(rows)} of {len(subjects)} models. The tables below have the others.")
        notes += dict.fromkeys(lines[0].report.note for lines in self.sets if lines[0].report.note)
        notes.append("runs in stock: transformers, vLLM and others as they are; in ropecli: with ropecli's attention")
        rows_of_text = [list(row) for row in zip(*(cells for _, cells in columns), strict=True)]
        return Table(self.title(), [head for head, _ in columns], rows_of_text, [*[BEST_NOTE] * marked, *notes])

    def title(self) -> str:
        """The base's checkpoint, and from where to where."""
        line = next((line for lines in self.sets for line in lines if line.is_base), self.lines[0])
        pretrained = line.report.original_max_position_embeddings
        return f"{clean(line.report.checkpoint)}, {pretrained} → {self.length} tokens"


def runs_in(line: Line) -> str:
    """stock: config.json says all. ropecli: it needs ropecli's attention, or cannot be saved."""
    try:
        method = find_method(line.report.method)
    except MethodError:
        return "unknown"
    return "ropecli" if method.remaps or (method.depends_on_length and not method.rope_type) else "stock"


def _of(line: Line, lines: Sequence[Line]) -> Line | None:
    """The line of the same subject in another set."""
    return next((other for other in lines if other.report.identity == line.report.identity), None)


def _longest(lines: Sequence[Line]) -> int:
    """The longest length at which there is something to compare, or the only method beside the base was measured."""
    lengths, least = lengths_of(lines), min(2, sum(not line.is_base for line in lines))
    return next((length for length in reversed(lengths) if len(ranked(lines, length)) >= least), lengths[-1])


def _short(lines: Sequence[Line]) -> int:
    """The longest length that the base was pretrained to read; 0 without base or such a length."""
    base = base_of(lines)
    lengths = base.report.lengths if base else []
    return max(
        (length for length in lengths if base and length <= base.report.original_max_position_embeddings), default=0
    )


def _column(lines: Sequence[Line], sets: Sequence[Sequence[Line]]) -> str:
    """The task; with its protocol, data or number of samples if another set has the same task."""
    report = lines[0].report
    others = [each[0].report for each in sets if each is not lines and each[0].report.title == report.title]
    words = [report.task] if any(other.task != report.task for other in others) else []
    words += [clean(report.source, 30)] if any(other.source != report.source for other in others) else []
    words = words or [report.counted] * bool(others)
    return report.title + (f" ({', '.join(words)})" if words else "")
