"""Whether a run's loss has left its best far behind. Needs the losses alone: no model, no random state."""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median

from ropecli.errors import DivergedError
from ropecli.training.checkpoints import found
from ropecli.training.state import CHECKPOINTS, metrics_until

_STEPS = 8
_FEWEST = 4
_LATEST = 3


class Divergence:
    """Whether a run's loss has left its best far behind.

    What is held against the best is the median of the last 8 steps' losses, nats per token: up to three spikes among
    them change nothing. The best is the least such median so far, of 4 steps or more: a few easy sequences at the
    beginning are no measure. All follows from the losses alone, so a resumed run acts as an uninterrupted one.

    max_rise: nats per token. output: the run's folder, whose checkpoints the error names.
    """

    def __init__(self, max_rise: float, output: Path) -> None:
        self._max_rise = max_rise
        self._output = output
        self._last: deque[float] = deque(maxlen=_STEPS)
        self._best = math.inf
        self._good: dict[int, bool] = {}

    @classmethod
    def from_losses(cls, losses: Mapping[int, float], max_rise: float, output: Path) -> "Divergence":
        """As it stands after the steps of `losses`."""
        divergence = cls(max_rise, output)
        for step in sorted(losses):
            divergence._enter(step, losses[step])
        return divergence

    def add(self, step: int, loss: float) -> None:
        """Takes in a step's loss, which is finite. Raises DivergedError."""
        self._enter(step, loss)
        now = median(self._last)
        if len(self._last) == _STEPS and now > self._best + self._max_rise:
            raise DivergedError(
                f"The loss is {now:.3f} nats per token around step {step}, and was {self._best:.3f} at its best: more "
                f"than max_loss_rise, {self._max_rise:g}, above. {self.kept()} Begin again with a lower learning_rate "
                "or more warmup_steps, into another --output; or, if it may rise so far, --resume with a higher "
                "max_loss_rise."
            )

    def last_good(self, steps: Iterable[int]) -> int | None:
        """Of the steps that checkpoints are of, the last one at which the loss stood well."""
        return max((step for step in steps if self._good.get(step, True)), default=None)

    def _enter(self, step: int, loss: float) -> None:
        self._last.append(loss)
        if len(self._last) >= _FEWEST:
            self._best = min(self._best, median(self._last))
        # the latest steps alone: most of eight would still be from before
        latest = median(list(self._last)[-_LATEST:])
        self._good[step] = latest <= self._best + self._max_rise / 2

    def kept(self) -> str:
        """A sentence that names the checkpoint which a run that goes wrong leaves."""
        folders = {position.step: path for position, path in sorted(found(self._output / CHECKPOINTS))}
        step = self.last_good(folders)
        return "No checkpoint was saved before." if step is None else f"{folders[step]} is of before, and is kept."


def losses_until(output: Path, step: int) -> dict[int, float]:
    """The losses by step, up to `step`, that a run's metrics.jsonl holds. Raises OutputError."""
    losses = ((values["step"], values.get("loss")) for values in metrics_until(output, step))  # evaluations have none
    return {at: loss for at, loss in losses if isinstance(loss, float) and math.isfinite(loss)}
