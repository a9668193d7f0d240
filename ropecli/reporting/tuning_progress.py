"""Progress of a tuning: the best so far in the progress bar, and a line per round and evaluation."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ropecli.messages import Step, progress_bar, say
from ropecli.reporting.tuning_tables import ppl_words
from ropecli.tuning.tune_report import TRAINING, Point

if TYPE_CHECKING:
    from ropecli.tuning.task import TuningTask


@contextlib.contextmanager
def watching(task: "TuningTask") -> Iterator[Callable[[Point], None]]:
    """Yield a function to call with every measured point."""
    with progress_bar("measuring", None) as step:
        watch = _Watch(task, step)
        yield watch.see
        watch.end_round()


class _Watch:
    """A round is one level on one number of documents: its points are comparable."""

    def __init__(self, task: "TuningTask", step: Step) -> None:
        self._lengths = task.original_length, task.target_length
        self._step = step
        self._round: tuple[str, int, int] | None = None
        self._best: Point | None = None
        self._seen = 0

    def see(self, point: Point) -> None:
        now = (point.level, point.score.documents, point.step if point.level == "search" else 0)
        if now != self._round:
            self._begin(now)
        self._seen += 1
        if self._best is None or point.score.objective < self._best.score.objective:
            self._best = point
        self._step(text=f"{point.level}: best {self._scores(self._best)}")
        if point.level in TRAINING:
            say(f"{point.level}, step {point.step}: {self._scores(point)}; best {self._scores(self._best)}")

    def _begin(self, now: tuple[str, int, int]) -> None:
        before, self._round = self._round, now
        if before is not None:
            self._say_round(before)
            if before[1] != now[1]:
                self._best = None  # on other documents; what learns begins at the best of the grid's last
        self._seen = 0

    def end_round(self) -> None:
        if self._round is not None:
            self._say_round(self._round)

    def _say_round(self, ended: tuple[str, int, int]) -> None:
        if self._best is None:
            return
        level, documents, iteration = ended
        if level in TRAINING:
            say(f"{level}: best {self._scores(self._best)} at step {self._best.step}")
            return
        name = f"{level}, iteration {iteration}" if level == "search" else f"{level}, {documents} documents"
        points = f"{self._seen} point{'s'[: self._seen > 1]}"
        say(f"{name}, {points}: best {self._scores(self._best)}, {self._best.label}")

    def _scores(self, point: Point) -> str:
        """Perplexities at the pretraining length and the target."""
        short, target = self._lengths
        at_target = "" if short == target else f" and {ppl_words(point.score.target)} at {target}"
        return f"{ppl_words(point.score.window)} at {short}{at_target}"
