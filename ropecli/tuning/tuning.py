"""Tuning: constants by a search, then what a level learns on top of them; and the checkpoint that it becomes."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ropecli.attention.patching import live_patch, patch_to
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.checkpoint.writing import write_json
from ropecli.live.loading import load_model
from ropecli.tuning.evolution import evolve
from ropecli.tuning.folding import refuse_unwritten, rewrite_shard
from ropecli.tuning.grid import search_constants
from ropecli.tuning.heads import tune_heads
from ropecli.tuning.matrices import tune_matrices
from ropecli.tuning.proof import logits_of, refuse_other
from ropecli.tuning.run import Run, Tuned, finish

_LEARNING = {"heads": tune_heads, "lora": tune_matrices}


def tune(run: Run) -> Tuned:
    """Runs the level that the settings ask for. The model is left as it was tuned.

    Raises MethodError for a method that cannot be tuned, PatchError for a model whose weights cannot hold what would be
    learned, ProofError, NotFiniteError.
    """
    level = run.settings.level
    plan = evolve(run) if level == "search" else search_constants(run)
    live_patch(run.model, plan.ropes)
    begun = run.judge.score(run.model, f"{level} 0")
    return _LEARNING[level](run, plan, begun) if level in _LEARNING else finish(run, plan, begun)


def tuned_to(
    tuned: Tuned,
    output: Path,
    *,
    link: bool = True,
    notes: Mapping[str, Any] | None = None,
    files: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda message: None,
) -> int:
    """Writes the tuned checkpoint, shard by shard, and proves it; returns how many live rotary tables did.

    Stock transformers loads what was written, before it gets its name, and must give the tuned model's logits. link,
    say: as patch_to's. notes: for ropecli.yaml, beside whether weights changed. files: JSON that lies in the folder
    too, by name. Raises OutputError, ProofError; then nothing is left behind.
    """
    return patch_to(
        tuned.plan,
        output,
        link=link,
        say=say,
        rewrite=partial(rewrite_shard, tuned.changed) if tuned.changed else None,
        notes={"tuned": {**(notes or {}), "weights_changed": bool(tuned.changed)}},
        check=partial(_complete, tuned, files or {}),
    )


def _complete(tuned: Tuned, files: Mapping[str, Any], folder: Path) -> None:
    """With the files beside the weights, and proved."""
    for name, value in files.items():
        write_json(folder / name, value)
    written, dtype = open_checkpoint(folder, weights=True), str(tuned.logits.dtype).removeprefix("torch.")
    refuse_unwritten(tuned.changed, written)
    model = load_model(written, dtype=dtype, device="cpu")
    found = logits_of(model, tuned.probe)
    refuse_other(found, tuned.logits, "Stock transformers, loading what was written, gives")
