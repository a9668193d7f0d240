"""`ropecli needle`: measures whether a model finds a key in a text."""

from typing import TYPE_CHECKING, Unpack

from ropecli.commands import options
from ropecli.evaluation import request
from ropecli.signature import command

if TYPE_CHECKING:
    from ropecli.reporting.outputs import Reports


class NeedleOptions(request.InMemoryOptions, request.NeedleOptions, total=False): ...


@command
def needle(checkpoints: request.CheckpointNames, **shared: Unpack[NeedleOptions]) -> "Reports":
    """Measure whether a model finds a needle in a text of your choice, by length and depth.

    The key is a random number of five digits. A model that confuses several needles scores 1 ÷ --num-needles.

    Several processes, started by `accelerate launch -m ropecli needle ...`, share the prompts.
    """
    from ropecli.evaluation.retrieval_prompts import choose_templates
    from ropecli.evaluation.tasks.asking import check_mode
    from ropecli.evaluation.tasks.retrieval import make_needle
    from ropecli.reporting.outputs import by_checkpoint, measure

    check_mode(shared["mode"])
    templates = choose_templates(shared)
    return measure(
        checkpoints,
        by_checkpoint(lambda scalings: make_needle(scalings, shared, templates)),
        options.reader_factory_of(shared),
        shared,
    )
