"""What a tuning says on its way."""

from types import SimpleNamespace

from ropecli.cli.tune_progress import watching
from ropecli.tune.record import Point, Score
from ropecli.tune.run import Settings

TASK = SimpleNamespace(
    window=64, target=128, settings=Settings(), calibration=SimpleNamespace(judged=SimpleNamespace(kept=[0, 1, 2]))
)


def point(level, nats, step=0):
    return Point(level, "yarn", 2.0, {}, Score(nats, nats, 1.25 * nats, 3), 1.0, step=step)


def said(capfd):
    return [line for line in capfd.readouterr().err.splitlines() if line.strip()]


def test_the_best_of_a_resumed_run_may_be_an_earlier_look(capfd):
    """The grid is told once more, the updates before the interruption are not."""
    grid, first, second = point("grid", 4.0), point("heads", 2.0, step=10), point("heads", 3.0, step=20)
    with watching(TASK, [grid, first]) as see:
        see(grid)
        see(second)
    lines = said(capfd)
    assert lines[0].startswith("grid, 3 documents, 1 point: best 54.60 at 64 and 54.60 at 128, yarn")
    assert lines[-1] == "heads: best 7.39 at 64 and 7.39 at 128 at step 10"


def test_what_learns_begins_at_the_best_constants(capfd):
    """Where no update makes it better, they stay the best."""
    with watching(TASK, []) as see:
        see(point("grid", 2.0))
        see(point("heads", 3.0, step=10))
    assert said(capfd)[-1] == "heads: best 7.39 at 64 and 7.39 at 128 at step 0"
