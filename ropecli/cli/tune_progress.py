"""How a tuning goes, on standard error: a bar with the best so far, and a line at the end of each stage or round."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ropecli.cli.terminal import err
from ropecli.tuning.tune_report import TRAINING, Point

if TYPE_CHECKING:
    from ropecli.tuning.tuning_task import TuningTask


@contextlib.contextmanager
def watching(task: "TuningTask", earlier: Sequence[Point]) -> Iterator[Callable[[Point], None]]:
    """Gives what is to be told of every measurement. earlier: those of the run that is gone on with."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=err, transient=True) as bar:
        watch = _Watch(task, bar, earlier)
        yield watch.see
        watch.end_stage()


class _Watch:
    """A round is of one level, on as many documents: its points can be held against each other."""

    def __init__(self, task: "TuningTask", bar: Progress, earlier: Sequence[Point]) -> None:
        self._lengths = task.original_length, task.target_length
        self._stages = expected(task)
        self._bar, self._task = bar, bar.add_task("measuring", total=None)
        # the updates behind these are not made again, whereas other levels tell of every point once more
        self._learned = [point for point in earlier if point.level in TRAINING]
        self._round: tuple[str, int, int] | None = None
        self._best: Point | None = None
        self._seen = 0

    def see(self, point: Point) -> None:
        now = (point.level, point.score.documents, point.step if point.level == "search" else 0)
        if now != self._round:
            self._change(now)
        self._seen += 1
        if self._best is None or point.score.objective < self._best.score.objective:
            self._best = point
        self._bar.update(self._task, advance=1, description=f"{point.level}: best {self._scores(self._best)}")
        if point.level in TRAINING and not err.is_terminal:
            self._say(f"{point.level}, step {point.step}: {self._scores(point)}; best {self._scores(self._best)}")

    def end_stage(self) -> None:
        if self._best is not None and self._round is not None:
            level = self._round[0]
            if level not in TRAINING:
                self._say_round()
            else:
                self._say(f"{level}: best {self._scores(self._best)} at step {self._best.step}")

    def _change(self, now: tuple[str, int, int]) -> None:
        """A line ends each stage, and where no bar is seen each round."""
        new_stage = self._round is None or self._round[0] != now[0]
        if self._round is not None and new_stage:
            self.end_stage()
        elif self._round is not None and not err.is_terminal:
            self._say_round()
        if new_stage:
            self._bar.reset(self._task, total=self._stages.get(now[0]))
        if self._round is not None and self._round[1] != now[1]:
            self._best = None  # on other documents; what learns begins at the best of the grid's last
        if new_stage and now[0] in TRAINING:
            self._best = min(
                filter(None, (self._best, *self._learned)), key=lambda point: point.score.objective, default=None
            )
        self._round, self._seen = now, 0

    def _say_round(self) -> None:
        if self._round is None or self._best is None:
            return
        level, documents, iteration = self._round
        name = f"{level}, iteration {iteration}" if level == "search" else f"{level}, {documents} documents"
        points = f"{self._seen} point{'s'[: self._seen > 1]}"
        self._say(f"{name}, {points}: best {self._scores(self._best)}, {self._best.label}")

    def _scores(self, point: Point) -> str:
        """Perplexities at the pretraining length and the target length."""
        from ropecli.reporting.cells import ppl_words

        short, target = self._lengths
        at_target = "" if short == target else f" and {ppl_words(point.score.target)} at {target}"
        return f"{ppl_words(point.score.window)} at {short}{at_target}"

    def _say(self, text: str) -> None:
        self._bar.console.print(text, markup=False, soft_wrap=True)


def expected(task: "TuningTask") -> dict[str, int]:
    """By level, at most how many measurements."""
    from ropecli.tuning.parameter_search import START_METHODS, rounds

    settings, documents = task.settings, len(task.calibration.evaluated.kept)
    schedule, evolution = settings.schedule, settings.evolution
    share = settings.points // len(settings.methods) * len(settings.methods)
    scores = -(-schedule.steps // schedule.evaluate_every)
    born = evolution.population + evolution.iterations * (evolution.mutations + evolution.crossovers)
    grid = sum(count for count, _ in rounds(share, documents))
    return {"grid": grid, "heads": scores, "lora": scores, "search": born + 1 + len(START_METHODS)}
