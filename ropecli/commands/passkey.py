"""`ropecli passkey`: measures whether a model finds a number among repeated sentences."""

from typing import TYPE_CHECKING, Unpack

from ropecli.commands import options
from ropecli.commands.signature import command

if TYPE_CHECKING:
    from ropecli.reporting.outputs import Reports


@command
def passkey(checkpoints: options.CheckpointNames, **shared: Unpack[options.SearchOptions]) -> "Reports":
    """Measure whether a model finds a pass key in a long text, by length and depth.

    The task of Mohtashami and Jaggi (2023, arXiv:2305.16300): a key among repeated sentences.

    Several processes, started by `accelerate launch -m ropecli passkey ...`, share the prompts.
    """
    from ropecli.evaluation.tasks.retrieval import make_passkey
    from ropecli.reporting.outputs import measure_subjects

    choice = options.retrieval_of(shared)
    return measure_subjects(
        options.listed(checkpoints),
        lambda subject: make_passkey(subject, choice),
        options.reader_factory_of(shared),
        shared,
        options.scaling_of(shared),
        single=True,
    )
