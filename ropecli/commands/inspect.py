"""`ropecli inspect`: shows what a checkpoint's files say about positions, and their problems."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from annotated_doc import Doc

from ropecli.messages import say
from ropecli.options import IS_CHECKPOINT, CheckpointName, Revision
from ropecli.signature import command

if TYPE_CHECKING:
    from ropecli.checkpoint.state import CheckpointState
    from ropecli.config.layers import Layer


@dataclass(frozen=True)
class Inspection:
    """states, reports: one per checkpoint. differences: fields in which the reports differ."""

    states: "tuple[CheckpointState, ...]"
    reports: tuple[dict[str, Any], ...]
    differences: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        if len(self.reports) == 1:
            return self.reports[0]
        return {"checkpoints": list(self.reports), "differences": list(self.differences)}


@command
def inspect(
    checkpoint: CheckpointName,
    other: Annotated[str | None, Doc("Second checkpoint, to show next to the first."), IS_CHECKPOINT] = None,
    *,
    probe: Annotated[
        bool,
        Doc(
            "Run a small model of the same type to find what each layer sees and which rotate, and compare the rotary "
            "tables of stock transformers."
        ),
    ] = False,
    revision: Revision = None,
) -> Inspection:
    """Show what a checkpoint reads, who says so, and its problems.

    Reads config.json and the tokenizer's, without loading the model. With two checkpoints, marks where they differ.
    """
    from ropecli.checkpoint.inspection import differences, inspect_checkpoint
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.checkpoint.state import read_state

    states = [read_state(open_checkpoint(checkpoint, revision=revision))]
    if other is not None:
        states.append(read_state(open_checkpoint(other)))
    if probe:
        say("Running a small model of this type ...")
    reports = tuple(
        inspect_checkpoint(state, _probed(state), _proved(state)) if probe else inspect_checkpoint(state)
        for state in states
    )
    return Inspection(tuple(states), reports, tuple(differences(reports)))


def _probed(state: "CheckpointState") -> "tuple[Layer, ...]":
    from ropecli.attention.layer_probe import probe_layers
    from ropecli.live.stock_transformers import stock_config_of

    probed = probe_layers(stock_config_of(state.checkpoint.config, state.checkpoint.name))
    read = state.settings.layers
    # config.json first: a small model reads too few tokens to show every kind of layer
    known = read if len(read) == len(probed) else probed
    return tuple(layer if layer.attention else probed_layer for layer, probed_layer in zip(known, probed, strict=True))


def _proved(state: "CheckpointState") -> dict[str, str]:
    from ropecli.config.findings import MISREAD
    from ropecli.errors import ProofError
    from ropecli.live.proof import prove_reading

    try:
        tables, why_not = prove_reading(state.checkpoint.config)
    except ProofError as error:
        return {"verdict": MISREAD, "message": str(error)}
    if tables is None:
        return {"verdict": "not proved", "message": f"Not compared with stock transformers: {why_not}"}
    return {"verdict": "equal", "message": "Stock transformers builds the same rotary tables from config.json."}
