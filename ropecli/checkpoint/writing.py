"""Writes a patched checkpoint, or reverts one to its original config, from the record in ropecli.yaml.

A folder has config.json, ropecli.yaml, linked or copied weights, and copies of all other files, except those that an
engine would read instead of config.json.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ropecli.atomic import new_folder
from ropecli.checkpoint.files import CONFIG, PROVENANCE, TOKENIZER_CONFIG, WEIGHTS
from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.patch_plan import PatchPlan
from ropecli.checkpoint.provenance import Provenance, entry, other_notes, read_provenance
from ropecli.checkpoint.state import read_state
from ropecli.config.changes import ConfigChange, diff
from ropecli.errors import PatchError
from ropecli.messages import size, warn
from ropecli.scaling.registry import find_method
from ropecli.version import VERSION

TRAINED_AFTER = "trained_after_patch"
"""The key in ropecli.yaml of a patched checkpoint whose weights were trained with the patch."""


def write_patch(
    plan: PatchPlan,
    output: Path,
    *,
    link: bool = True,
    check: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Write the patched checkpoint, which the caller has proved.

    plan: for a distance method, with its layout (attention.patching.with_layout). link: hard-link the weights where
    possible; otherwise copy them, with a warning. check: called on the complete folder before it is renamed. Raises
    OSError, OutputError: nothing is written.
    """
    plan.source.weight_files()
    with new_folder(output) as folder:
        write_json(folder / CONFIG, plan.config)
        tokenizer_config, lengths = _raise_tokenizer(plan)
        _write_record(folder, plan, lengths)
        _place_files(plan.source, folder, tokenizer_config, link=link)
        check(folder)


def write_json(path: Path, value: dict[str, Any]) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _write_record(folder: Path, plan: PatchPlan, tokenizer: dict[str, Any]) -> None:
    """Write ropecli.yaml: the patch, the changes needed to revert it, and the entries that are not of a patch."""
    spec, positions = plan.spec, plan.positions
    record = {
        "ropecli": VERSION,
        "source": plan.source.origin(digest=False),
        "original_max_position_embeddings": positions.pretraining_length,
        "target_length": positions.context_length,
        "scaling": {
            "method": spec.method.name,
            "factor": float(spec.factor),
            "params": {key: list(value) if isinstance(value, tuple) else value for key, value in spec.params.items()},
            "layer_types": list(plan.written),
        },
        "changes": [change._asdict() for change in diff(plan.original, plan.config)],
        "tokenizer": tokenizer,
    }
    _write_notes(folder, record | other_notes(plan.source.record))


def _write_notes(folder: Path, record: dict[str, Any]) -> None:
    header = "# Record of what ropecli did to this checkpoint. Needed to patch it again or to revert it.\n"
    scaling = record.get("scaling")
    if scaling and find_method(scaling["method"]).remaps:
        header += "# transformers can load this checkpoint only after `import ropecli.attention`.\n"
    text = yaml.safe_dump(record, sort_keys=False, allow_unicode=True)
    (folder / PROVENANCE).write_text(header + text, encoding="utf-8")


def _raise_tokenizer(plan: PatchPlan) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The tokenizer's config to write, and the entry of ropecli.yaml: model_max_length before and after."""
    config = _tokenizer_before(plan.source.tokenizer_config, read_state(plan.source).note)
    if config is None or "model_max_length" not in config:
        return config, {}
    before = config["model_max_length"]
    raises = isinstance(before, int | float) and before < plan.positions.context_length
    after = plan.positions.context_length if raises else before
    return {**config, "model_max_length": after}, {"model_max_length": [before, after]}


def _place_files(source: Checkpoint, folder: Path, tokenizer_config: dict[str, Any] | None, *, link: bool) -> None:
    """Link or copy the checkpoint's files, except config.json and ropecli.yaml, and write tokenizer_config.

    Only weights are linked, because users edit the small files.
    """
    copied = 0
    for file in source.files():
        linked = place(file, folder / file.name, link=link and file.match(WEIGHTS))
        copied += file.stat().st_size if file.match(WEIGHTS) and not linked else 0
    if tokenizer_config is not None:
        write_json(folder / TOKENIZER_CONFIG, tokenizer_config)
    if link and copied:
        warn(
            f"the weights were copied ({size(copied)}), because hard links from {source.folder} to the "
            "output are not possible."
        )


def place(source: Path, target: Path, *, link: bool) -> bool:
    """Hard-link if `link` is true and possible, otherwise copy. Returns whether it linked.

    Symbolic links are not used, because they would break when the Hub's cache is cleared.
    """
    source = source.resolve()  # files in the Hub's cache are links to blobs
    if link:
        with contextlib.suppress(OSError):
            os.link(source, target)
            return True
    shutil.copyfile(source, target)
    return False


@dataclass(frozen=True)
class Reversal:
    """The plan of a revert.

    config, tokenizer_config: the original ones. changes, tokenizer_changes: from the current to the original ones.
    notes: entries of ropecli.yaml that still apply, possibly none.
    """

    source: Checkpoint
    config: dict[str, Any]
    tokenizer_config: dict[str, Any] | None
    changes: tuple[ConfigChange, ...]
    tokenizer_changes: tuple[ConfigChange, ...]
    notes: dict[str, Any]


def plan_reversal(checkpoint: Checkpoint) -> Reversal:
    """Plan a revert. Raises PatchError if the original config is unknown, or the weights are no longer its own."""
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
    if checkpoint.record.get(TRAINED_AFTER):
        source = entry(checkpoint.record, "source").get("checkpoint")
        raise PatchError(
            f"{checkpoint.name}: its weights were trained after the patch, so there is no original to go back to. Use "
            f"the checkpoint that was patched: {source}."
        )
    before = checkpoint.tokenizer_config
    tokenizer_config = _tokenizer_before(before, note)
    return Reversal(
        source=checkpoint,
        config=note.original,
        tokenizer_config=tokenizer_config,
        changes=tuple(diff(checkpoint.config, note.original)),
        tokenizer_changes=tuple(diff(before or {}, tokenizer_config or {})),
        notes=other_notes(checkpoint.record),
    )


def revert_to(reversal: Reversal, output: Path, *, link: bool = True) -> None:
    """Write the original checkpoint. link: see write_patch. Raises OSError, OutputError: nothing is written."""
    reversal.source.weight_files()
    with new_folder(output) as folder:
        write_json(folder / CONFIG, reversal.config)
        if reversal.notes:
            _write_notes(folder, reversal.notes)
        _place_files(reversal.source, folder, reversal.tokenizer_config, link=link)


def _tokenizer_before(config: dict[str, Any] | None, note: Provenance | None) -> dict[str, Any] | None:
    """The tokenizer's config with its model_max_length before the patch; one that was edited after it stays."""
    if config is None or note is None or note.tokenizer_lengths[1:] != (config.get("model_max_length"),):
        return config
    return {**config, "model_max_length": note.tokenizer_lengths[0]}
