"""The way back: a patched checkpoint as it was before all its patches, by what its ropecli.yaml says.

Refuses what would be a guess: a folder without that note, with a config.json that was edited since, or with weights
that were tuned.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropecli.atomic import new_folder
from ropecli.checkpoint.opening import CONFIG, Checkpoint
from ropecli.checkpoint.provenance import (
    PROVENANCE,
    Provenance,
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
    """What going back would write.

    config, tokenizer_config: as they were. changes, tokenizer_changes: against both as they stand. notes: what of
    ropecli.yaml still holds; empty where nothing does.
    """

    source: Checkpoint
    config: dict[str, Any]
    tokenizer_config: dict[str, Any] | None
    changes: tuple[ConfigChange, ...]
    tokenizer_changes: tuple[ConfigChange, ...]
    notes: dict[str, Any]
    warnings: tuple[str, ...]


def plan_reversal(checkpoint: Checkpoint) -> Reversal:
    """Raises PatchError where the original config is not known for sure."""
    note = read_provenance(checkpoint)
    if note is None:
        raise PatchError(
            f"{checkpoint.name}: no {PROVENANCE} in {checkpoint.folder} tells of a patch, so none can be taken back. "
            "Name a folder that ropecli patch wrote."
        )
    if note.edited:
        raise PatchError(
            f"{checkpoint.name}: config.json was edited since {PROVENANCE} was written ({', '.join(note.edited)}), so "
            f"what it was before is not known for sure. Undo the edit; {PROVENANCE} lists the value that was written."
        )
    record = read_record(checkpoint.folder)
    if tuned_weights(record):
        raise PatchError(
            f"{checkpoint.name}: `ropecli tune` changed the weights too, and they are not written down as they were. "
            f"Go back to the checkpoint that was tuned, {untuned(record)}."
        )
    before = checkpoint.tokenizer_config
    tokenizer_config, warnings = _tokenizer_before(before, note)
    notes = other_notes(record)
    return Reversal(
        source=checkpoint,
        config=note.original,
        tokenizer_config=tokenizer_config,
        changes=tuple(diff(checkpoint.config, note.original)),
        tokenizer_changes=tuple(diff(before or {}, tokenizer_config or {})),
        notes=notes,
        warnings=(*warnings, *_warn_of_training(notes, note)),
    )


def revert_to(
    reversal: Reversal, output: Path, *, link: bool = True, say: Callable[[str], None] = lambda message: None
) -> None:
    """Writes the checkpoint as it was. link, say: as patch_to has them. Raises OutputError; nothing is left then."""
    with new_folder(output) as folder:
        write_json(folder / CONFIG, reversal.config)
        if reversal.notes:
            write_notes(folder, reversal.notes)
        place_files(reversal.source, folder, reversal.tokenizer_config, link=link, say=say)


def _tokenizer_before(config: dict[str, Any] | None, note: Provenance) -> tuple[dict[str, Any] | None, list[str]]:
    """The tokenizer's config with the model_max_length that it had, and what there is to warn of."""
    now = (config or {}).get("model_max_length")
    if config is None or now is None or note.tokenizer_lengths == ():
        return config, []
    if note.tokenizer_lengths is None:
        # notes of before it was recorded; a cap below it was raised to it
        raised = now == note.target_length != note.original_length
        said = f"{PROVENANCE} does not say what the tokenizer's model_max_length was before; it stays at {now} tokens."
        return config, [said] if raised else []
    before, after = note.tokenizer_lengths
    if now != after:
        said = f"the tokenizer's model_max_length was edited since the patch, from {after} to {now}; it stays so."
        return config, [said]
    return {**config, "model_max_length": before}, []


def _warn_of_training(notes: dict[str, Any], note: Provenance) -> list[str]:
    training = notes.get("finetuned")
    length = training.get("length") if isinstance(training, dict) else None
    if training is None or (isinstance(length, int) and length <= note.original_length):
        return []
    return [
        f"the weights were fine-tuned for the positions of {note.method} ×{note.factor:g}: with the original "
        "config they do worse. The original weights are in the checkpoint that was fine-tuned."
    ]
