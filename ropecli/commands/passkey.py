"""`ropecli passkey`: measures whether a model finds a number among repeated sentences."""

from typing import TYPE_CHECKING, Unpack

from ropecli.commands import options
from ropecli.evaluation import request
from ropecli.signature import command

if TYPE_CHECKING:
    from ropecli.reporting.outputs import Reports


class PasskeyOptions(request.InMemoryOptions, request.SearchOptions, total=False): ...


@command
def passkey(checkpoints: request.CheckpointNames, **shared: Unpack[PasskeyOptions]) -> "Reports":
    """Measure whether a model finds a pass key in a long text, by length and depth.

    The task of Mohtashami and Jaggi (2023, arXiv:2305.16300): a key among repeated sentences.

    Several processes, started by `accelerate launch -m ropecli passkey ...`, share the prompts.
    """
    from ropecli.evaluation.tasks.asking import check_mode
    from ropecli.evaluation.tasks.retrieval import make_passkey
    from ropecli.reporting.outputs import by_checkpoint, measure

    check_mode(shared["mode"])
    return measure(
        checkpoints,
        by_checkpoint(lambda scalings: make_passkey(scalings, shared)),
        options.reader_factory_of(shared),
        shared,
    )
