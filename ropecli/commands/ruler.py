"""`ropecli ruler`: finds the effective context length with RULER's tasks."""

from typing import TYPE_CHECKING, Unpack

from ropecli.commands import options
from ropecli.evaluation import request
from ropecli.signature import command

if TYPE_CHECKING:
    from ropecli.reporting.outputs import Reports


class RulerOptions(request.InMemoryOptions, request.RulerOptions, total=False): ...


@command
def ruler(checkpoints: request.CheckpointNames, **shared: Unpack[RulerOptions]) -> "Reports":
    """Find the effective context length: RULER's tasks at several lengths.

    The effective length is the longest one up to which the mean score stays at or above --threshold.

    Several processes, started by `accelerate launch -m ropecli ruler ...`, share the prompts.
    """
    from ropecli.evaluation.ruler_tasks import choose_tasks
    from ropecli.evaluation.tasks.asking import check_mode
    from ropecli.evaluation.tasks.ruler import make_ruler
    from ropecli.reporting.outputs import by_checkpoint, measure

    check_mode(shared["mode"])
    choose_tasks(shared["tasks"])
    return measure(
        checkpoints,
        by_checkpoint(lambda scalings: make_ruler(scalings, shared)),
        options.reader_factory_of(shared, shared["batch_size"]),
        shared,
    )
