"""Reverts a patched checkpoint to its original config, from the record in ropecli.yaml.

Refuses a folder without ropecli.yaml, with a config.json edited after the patch, or with tuned weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropecli.atomic import new_folder
from ropecli.checkpoint.card import README, without_section
from ropecli.checkpoint.opening import CONFIG, Checkpoint
from ropecli.checkpoint.provenance import (
    PROVENANCE,
    Provenance,
    entry,
    other_notes,
    read_provenance,
    read_record,
    tuned_weights,
    untuned,
)
from ropecli.checkpoint.writing import place_files, write_json, write_notes
from ropecli.config.changes import ConfigChange, diff
from ropecli.errors import PatchError


@dataclass(frozen=True)
class Reversal:
    """What a revert would write.

    config, tokenizer_config: the original ones. changes, tokenizer_changes: from the current to the original ones.
    notes: entries of ropecli.yaml that still apply, possibly none.
    """

    source: Checkpoint
    config: dict[str, Any]
    tokenizer_config: dict[str, Any] | None
    changes: tuple[ConfigChange, ...]
    tokenizer_changes: tuple[ConfigChange, ...]
    notes: dict[str, Any]
    warnings: tuple[str, ...]


def plan_reversal(checkpoint: Checkpoint) -> Reversal:
    """Plan a revert. Raises PatchError if the original config is unknown."""
    note = read_provenance(checkpoint)
    if note is None:
        raise PatchError(
            f"{checkpoint.name}: {checkpoint.folder} has no {PROVENANCE} with a patch to revert. Choose a folder "
            "written by ropecli patch."
        )
    if note.edited:
        raise PatchError(
            f"{checkpoint.name}: config.json was edited after {PROVENANCE} was written ({', '.join(note.edited)}), so "
            f"its original values are unknown. Undo the edit; {PROVENANCE} lists the values that were written."
        )
    record = read_record(checkpoint.folder)
    if tuned_weights(record):
        raise PatchError(
            f"{checkpoint.name}: `ropecli tune` changed the weights, which cannot be reverted. Use the checkpoint "
            f"before tuning, {untuned(record)}."
        )
    before = checkpoint.tokenizer_config
    tokenizer_config, warnings = _tokenizer_before(before, note)
    notes = other_notes(record)
    if "finetuned" in notes:
        length = entry(notes, "finetuned").get("length")
        if not isinstance(length, int) or length > note.original_length:
            warnings.append(
                f"the weights were fine-tuned with {note.method} ×{note.factor:g} and perform worse with the original "
                "config. The original weights are in the checkpoint before fine-tuning."
            )
    return Reversal(
        source=checkpoint,
        config=note.original,
        tokenizer_config=tokenizer_config,
        changes=tuple(diff(checkpoint.config, note.original)),
        tokenizer_changes=tuple(diff(before or {}, tokenizer_config or {})),
        notes=notes,
        warnings=tuple(warnings),
    )


def revert_to(
    reversal: Reversal, output: Path, *, link: bool = True, say: Callable[[str], None] = lambda message: None
) -> None:
    """Write the original checkpoint. link, say: see write_patch. Raises OutputError, and then writes nothing."""
    with new_folder(output) as folder:
        write_json(folder / CONFIG, reversal.config)
        if reversal.notes:
            write_notes(folder, reversal.notes)
        place_files(reversal.source, folder, reversal.tokenizer_config, link=link, say=say)
        if (readme := folder / README).exists():
            readme.write_bytes(without_section(readme.read_bytes()))


def _tokenizer_before(config: dict[str, Any] | None, note: Provenance) -> tuple[dict[str, Any] | None, list[str]]:
    """The tokenizer's config with its original model_max_length, and warnings."""
    now = (config or {}).get("model_max_length")
    if config is None or now is None or note.tokenizer_lengths == ():
        return config, []
    if note.tokenizer_lengths is None:
        # older record; a patch raises a smaller model_max_length to the target length
        raised = now == note.target_length != note.original_length
        warning = f"{PROVENANCE} does not have the tokenizer's original model_max_length; it stays at {now} tokens."
        return config, [warning] if raised else []
    before, after = note.tokenizer_lengths
    if now != after:
        warning = f"the tokenizer's model_max_length was edited after the patch, from {after} to {now}; keeping {now}."
        return config, [warning]
    return {**config, "model_max_length": before}, []
