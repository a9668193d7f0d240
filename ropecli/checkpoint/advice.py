"""How to make a checkpoint read more: the same advice in inspect, plan, finetune and patch."""

import shlex

from ropecli.checkpoint.patch_plan import PatchPlan, make_plan
from ropecli.checkpoint.provenance import patch_command
from ropecli.checkpoint.state import CheckpointState, read_state
from ropecli.errors import RopecliError
from ropecli.scaling.spec import make_spec

_HEADROOM = 2
"""Factor of yarn by hand ÷ what the length needs. Recall of the demo at 1,024 peaks there (extension/README.md)."""


def how_to_read(state: CheckpointState, length: int) -> str:
    """A sentence with the commands that extend the checkpoint to this length, tokens; empty if none can."""
    name, positions = state.checkpoint.name, state.positions
    makers = state.before.known_makers
    needed, options = length / positions.pretraining_length, {"target_length": length}
    method, factor, kind = "yarn", _HEADROOM * needed, "with headroom"
    if makers and makers.extension and makers.extension[1] >= needed:
        method, factor, kind = *makers.extension[:2], "as its makers do"
    try:
        make_plan(state.checkpoint, make_spec(method, factor), target_length=length, choose_factor=False)
    except RopecliError:
        return ""
    by_hand = patch_command(name, None, method, factor, options=options)
    search = f"ropecli extend {shlex.quote(name)} --length {length} --data YOUR_TEXTS --output DIR"
    return f"To read {length} tokens, measured on your texts: `{search}`. By hand, {kind}: `{by_hand}`."


def without_headroom(plan: PatchPlan) -> str:
    """What to expect at the end of the range of a factor; empty for one with headroom, and for the makers' own."""
    spec, length, makers = plan.spec, plan.positions.context_length, read_state(plan.source).before.known_makers
    needed = length / plan.positions.pretraining_length
    is_theirs = bool(makers and makers.extension and makers.extension[:2] == (spec.method.name, spec.factor))
    if spec.method.name != "yarn" or needed < spec.factor or is_theirs:
        return ""
    return (
        f"On the two small models that it was measured on, yarn hardly uses far text at the end of its range; with "
        f"headroom it does: --factor {_HEADROOM * needed:g} --target-length {length}. `ropecli extend` measures yours."
    )
