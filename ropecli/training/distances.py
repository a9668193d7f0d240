"""What a recipe may ask of a checkpoint that carries a relative-position method, told before anything is trained.

Such a method counts the tokens of a row one by one, whatever positions they are given, and needs its own attention.
"""

import numpy as np

from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.patch_plan import PatchPlan
from ropecli.config.saved_remapping import Carrier, read_carrier
from ropecli.errors import RecipeError
from ropecli.training.recipe import Recipe


def carrier_in_effect(checkpoint: Checkpoint, plan: PatchPlan | None = None) -> Carrier | None:
    """The relative-position method that a run trains with, if any. plan: the patch that it begins with, not on disk
    yet. Raises CheckpointError for a config.json that holds half of one."""
    return read_carrier(plan.config if plan else checkpoint.config)


def refuse_beside_method(recipe: Recipe, carrier: Carrier | None) -> None:
    """Raises RecipeError with all that the method would do wrong in silence, or not do at all."""
    if carrier is None:
        return
    method, faults = carrier.method, []
    if recipe.positions != "full":
        faults.append(
            f"positions: {recipe.positions} leaves gaps, and {method} goes by the order of the tokens: near keys would "
            "be as far as the gaps say, and far ones not. Take positions: full."
        )
    if any(source.sequences == "packed" for source in recipe.sources):
        faults.append(f"sequences: packed lays documents side by side; {method} reads one a row. Take long or concat.")
    if recipe.attn != "auto":
        faults.append(
            f"attn: {recipe.attn} would do away with {method}, which is attention of its own. Take attn: auto."
        )
    if faults:
        raise RecipeError(f"{method} cannot be trained so:\n" + "\n".join(f"  {fault}" for fault in faults))


def within_plain(length: int, carrier: Carrier | None) -> list[str]:
    """A sentence for sequences so short, tokens, that the method changes nothing in them."""
    if carrier is None:
        return []
    last, keys = np.array([length - 1]), np.arange(length)
    if not np.array_equal(carrier.remapping().distances(last, keys), last[:, None] - keys):
        return []
    return [
        f"sequences of {length} tokens are too short for {carrier.method} to change anything: it is trained as plain "
        "attention. Give a greater length."
    ]
