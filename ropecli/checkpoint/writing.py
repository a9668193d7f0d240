"""Writes a patched checkpoint: its config and its record, the weights linked or copied, the rest copied."""

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
from ropecli.checkpoint.opening import CONFIG, TOKENIZER_CONFIG, Checkpoint
from ropecli.checkpoint.patch_plan import PatchPlan
from ropecli.checkpoint.provenance import PROVENANCE, other_notes, read_provenance, read_record
from ropecli.config.changes import diff, key_orders, undo
from ropecli.errors import CheckpointError, PatchError
from ropecli.scaling.registry import scaling_methods
from ropecli.scaling.spec import ScaledRope
from ropecli.version import VERSION

Prove = Callable[[Path, Mapping[str | None, ScaledRope]], int]
"""Compares the model that stock transformers builds from folder/config.json with the ropes; how many tables agree."""
Rewrite = Callable[[Path, Path], bool]
"""Writes a weight file anew, from the first path to the second; whether there was anything to change in it."""


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
    """Writes the patched checkpoint; returns what `prove` does, or 0.

    plan: of a distance method, with its layout (attention.patching.with_layout). prove: compares the written config
    with the live model; `attention.patching.patch_to` brings it. link: hard-link the weights where the file system
    can, copy them elsewhere and `say` so. rewrite: for weights that change too. notes: for ropecli.yaml, beside the
    patch. check: of the whole folder, before it gets its name. Raises OutputError, ProofError; then nothing is left
    behind.
    """
    if plan.unwritable:
        raise PatchError(plan.unwritable)
    plan.source.weight_files()
    with new_folder(output) as folder:
        write_json(folder / CONFIG, plan.config)
        tokenizer_config, lengths = _raise_tokenizer(plan)
        write_record(folder, plan, lengths)
        proved = prove(folder, plan.ropes) if prove else 0
        place_files(plan.source, folder, tokenizer_config, link=link, say=say, rewrite=rewrite)
        if notes:
            write_notes(folder, read_record(folder) | dict(notes))
        check(folder)
    return proved


def write_json(path: Path, value: dict[str, Any]) -> None:
    try:
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise PatchError(f"{path.name} would hold NaN or an infinity, which JSON has not: {error}") from error
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except UnicodeEncodeError:  # a lone surrogate, which JSON can only hold escaped
        path.write_text(json.dumps(value, indent=2) + "\n", encoding="ascii")


def write_record(folder: Path, plan: PatchPlan, tokenizer_lengths: tuple[Any, ...] | None = None) -> None:
    """Writes ropecli.yaml: enough to say what was done, and to go back to the original config.

    tokenizer_lengths: as Provenance has them.
    """
    geometry = plan.ropes[plan.scaled[0]].geometry
    changes = diff(plan.original, plan.config)
    record = {
        "ropecli": VERSION,
        "source": plan.source.origin(),
        "original_max_position_embeddings": geometry.original_max_position_embeddings,
        "target_length": plan.target_length,
        "scaling": {
            "method": plan.spec.method.name,
            "factor": float(plan.spec.factor),
            "params": {key: _plain(value) for key, value in plan.spec.params.items()},
            "layer_types": list(plan.scaled),
        },
        "changes": [change._asdict() for change in changes],
    }
    if orders := key_orders(plan.original, undo(plan.config, changes)):
        record["key_order"] = orders
    if tokenizer_lengths is not None:
        record["tokenizer"] = {"model_max_length": list(tokenizer_lengths)} if tokenizer_lengths else {}
    write_notes(folder, record | other_notes(read_record(plan.source.folder)))


def write_notes(folder: Path, record: dict[str, Any]) -> None:
    header = "# What ropecli did to this checkpoint; read by it when the checkpoint is patched again.\n"
    method = scaling_methods().get(record.get("scaling", {}).get("method"))
    if method is not None and method.remaps:
        header += "# transformers loads this checkpoint after `import ropecli.attention`.\n"
    text = yaml.safe_dump(record, sort_keys=False, allow_unicode=True)
    (folder / PROVENANCE).write_text(header + text, encoding="utf-8")


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _raise_tokenizer(plan: PatchPlan) -> tuple[dict[str, Any] | None, tuple[Any, ...] | None]:
    """The tokenizer's config to write, and its model_max_length before and after as Provenance has them."""
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
    """Puts the checkpoint's files into `folder`, all but config.json and ropecli.yaml; tokenizer_config as given.

    Only weights are shared with the source: small files get edited by hand.
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
            f"the weights were copied, {copied / 2**30:.3g} GiB: no hard link leads from {source.folder} to the output."
        )


def place(source: Path, target: Path, *, link: bool) -> bool:
    """Hard-links where asked and possible, else copies; whether it linked.

    Never by a symbolic link: it would break when the Hub's cache is cleared.
    """
    source = source.resolve()  # the Hub's cache holds links to its blobs
    if link:
        with contextlib.suppress(OSError):
            os.link(source, target)
            return True
    try:
        source.open("rb").close()
    except OSError as error:  # else it would seem that the output could not be written
        raise CheckpointError(f"{source} cannot be read: {error.strerror}.") from error
    shutil.copyfile(source, target)
    return False
