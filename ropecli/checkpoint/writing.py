"""Writes a patched checkpoint: config.json, ropecli.yaml, linked or copied weights, and copies of all other files."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from ropecli.atomic import new_folder
from ropecli.checkpoint.card import README, add_section
from ropecli.checkpoint.opening import CONFIG, TOKENIZER_CONFIG, Checkpoint
from ropecli.checkpoint.patch_plan import PatchPlan
from ropecli.checkpoint.provenance import PROVENANCE, other_notes, read_provenance, read_record
from ropecli.config.changes import diff, key_orders, undo
from ropecli.errors import CheckpointError, PatchError
from ropecli.scaling.registry import find_method
from ropecli.scaling.spec import ScaledRope
from ropecli.version import VERSION

Prove = Callable[[Path, Mapping[str | None, ScaledRope], dict[str, Any]], int]
"""Compares the model that stock transformers builds from folder/config.json with the ropes and the original config;
returns the number of tables that agree."""
Rewrite = Callable[[Path, Path], bool]
"""Writes a changed copy of a weight file, from the first path to the second; returns False if nothing changes."""


def write_patch(
    plan: PatchPlan,
    output: Path,
    *,
    prove: Prove | None = None,
    link: bool = True,
    say: Callable[[str], None] = lambda message: None,
    rewrite: Rewrite | None = None,
    notes: Mapping[str, Any] = MappingProxyType({}),
    check: Callable[[Path], None] = lambda folder: None,
) -> int:
    """Write the patched checkpoint. Returns the result of `prove`, or 0.

    plan: for a distance method, with its layout (attention.patching.with_layout). prove: compares the written config
    with the live model (see attention.patching.patch_to). link: hard-link the weights where possible; otherwise copy
    them and report it with `say`. rewrite: for weights that change too. notes: further entries of ropecli.yaml. check:
    called on the complete folder before it is renamed. Raises OutputError, ProofError, and then writes nothing.
    """
    if plan.unwritable:
        raise PatchError(plan.unwritable)
    plan.source.weight_files()
    with new_folder(output) as folder:
        write_json(folder / CONFIG, plan.config)
        tokenizer_config, lengths = _raise_tokenizer(plan)
        write_record(folder, plan, lengths, notes)
        proved = prove(folder, plan.ropes, plan.original) if prove else 0
        place_files(plan.source, folder, tokenizer_config, link=link, say=say, rewrite=rewrite)
        if (folder / README).exists():
            add_section(folder / README, Checkpoint(plan.source.name, folder, plan.config))
        check(folder)
    return proved


def write_json(path: Path, value: dict[str, Any]) -> None:
    try:
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise PatchError(f"{path.name} would contain NaN or infinity, which JSON does not support: {error}") from error
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except UnicodeEncodeError:  # a lone surrogate must be escaped in JSON
        path.write_text(json.dumps(value, indent=2) + "\n", encoding="ascii")


def write_record(
    folder: Path,
    plan: PatchPlan,
    tokenizer_lengths: tuple[Any, ...] | None = None,
    notes: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write ropecli.yaml: the patch, and the changes needed to revert it. tokenizer_lengths: see Provenance.

    notes: further entries.
    """
    spec, geometry = plan.spec, plan.ropes[plan.scaled[0]].geometry
    changes = diff(plan.original, plan.config)
    record = {
        "ropecli": VERSION,
        "source": plan.source.origin(digest=False),
        "original_max_position_embeddings": geometry.original_max_position_embeddings,
        "target_length": plan.target_length,
        "scaling": {
            "method": spec.method.name,
            "factor": float(spec.factor),
            "params": {key: list(value) if isinstance(value, tuple) else value for key, value in spec.params.items()},
            "layer_types": list(plan.scaled),
        },
        "changes": [change._asdict() for change in changes],
    }
    if orders := key_orders(plan.original, undo(plan.config, changes)):
        record["key_order"] = orders
    if tokenizer_lengths is not None:
        record["tokenizer"] = {"model_max_length": list(tokenizer_lengths)} if tokenizer_lengths else {}
    write_notes(folder, record | other_notes(read_record(plan.source.folder)) | dict(notes))


def write_notes(folder: Path, record: dict[str, Any]) -> None:
    header = "# Record of what ropecli did to this checkpoint. Needed to patch it again or to revert it.\n"
    scaling = record.get("scaling")
    if scaling and find_method(scaling["method"]).remaps:
        header += "# transformers can load this checkpoint only after `import ropecli.attention`.\n"
    text = yaml.safe_dump(record, sort_keys=False, allow_unicode=True)
    (folder / PROVENANCE).write_text(header + text, encoding="utf-8")


def _raise_tokenizer(plan: PatchPlan) -> tuple[dict[str, Any] | None, tuple[Any, ...] | None]:
    """The tokenizer's config to write, and its model_max_length before and after (see Provenance)."""
    config, note = plan.source.tokenizer_config, read_provenance(plan.source)
    if config is None or "model_max_length" not in config:
        return config, ()
    before, known = config["model_max_length"], True
    if note is not None and not note.edited:
        known = note.tokenizer_lengths is not None
        if note.tokenizer_lengths and note.tokenizer_lengths[1] == before:
            before = note.tokenizer_lengths[0]
    raises = isinstance(before, int | float) and before < plan.target_length
    after = plan.target_length if raises else before
    return {**config, "model_max_length": after}, (before, after) if known else None


def place_files(
    source: Checkpoint,
    folder: Path,
    tokenizer_config: dict[str, Any] | None,
    *,
    link: bool,
    say: Callable[[str], None],
    rewrite: Rewrite | None = None,
) -> None:
    """Link or copy the checkpoint's files, except config.json and ropecli.yaml, and write tokenizer_config.

    Only weights are linked, because users edit the small files.
    """
    weights = source.weight_files()
    copied = 0
    for file in source.files():
        if rewrite is not None and file in weights and rewrite(file, folder / file.name):
            continue
        linked = place(file, folder / file.name, link=link and file in weights)
        copied += file.stat().st_size if file in weights and not linked else 0
    if tokenizer_config is not None:
        write_json(folder / TOKENIZER_CONFIG, tokenizer_config)
    if link and copied:
        say(
            f"the weights were copied ({copied / 2**30:.3g} GiB), because hard links from {source.folder} to the "
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
    try:
        source.open("rb").close()
    except OSError as error:  # otherwise the error would look like a failure to write the output
        raise CheckpointError(f"{source} cannot be read: {error.strerror}.") from error
    shutil.copyfile(source, target)
    return False
