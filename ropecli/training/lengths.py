"""How long a run's sequences are, and how far their positions reach, where the recipe leaves it to the checkpoint."""

from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.patch_plan import PatchPlan
from ropecli.checkpoint.state import read_state
from ropecli.data.positions import refuse_impossible
from ropecli.training.recipe import Recipe


def settle_lengths(recipe: Recipe, checkpoint: Checkpoint, plan: PatchPlan | None = None) -> tuple[int, int]:
    """(length of a sequence, window that its positions reach), tokens.

    The window is the extended one; a sequence fills it, or, where positions have gaps, the pretraining window.
    plan: the patch in effect when the run begins, where it is not on disk yet. Raises RecipeError for sequences
    longer than the window that their positions are to reach.
    """
    extended = plan.target_length if plan else read_state(checkpoint).context_length
    window = recipe.window or extended
    if recipe.positions == "full":
        return recipe.length or extended, window
    length = recipe.length or read_state(checkpoint).pretraining_length
    refuse_impossible(recipe.positions, length, window, recipe.pose_chunks)
    return length, window


def beyond_window(recipe: Recipe, length: int, window: int, extended: int) -> list[str]:
    """Sentences for sequences, or positions with gaps, that reach beyond the extended window; all in tokens."""
    if recipe.positions != "full" and window > extended:
        return [f"positions up to {window} exceed the checkpoint's window, {extended}: patch it for that first."]
    if length > extended:
        return [f"sequences of {length} tokens exceed the checkpoint's window, {extended}: patch it first."]
    return []
