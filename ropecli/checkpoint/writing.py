"""Writes a patched checkpoint: its config and its record, the weights linked or copied, the rest copied."""

import contextlib
import fnmatch
import json
import os
import shutil
from pathlib import Path
from typing import Any

import yaml

from ropecli.atomic import new_folder
from ropecli.checkpoint.dialects import sees_whole_context
from ropecli.checkpoint.plan import PatchPlan
from ropecli.checkpoint.proof import prove
from ropecli.checkpoint.provenance import PROVENANCE, diff, read_record
from ropecli.checkpoint.reading import CHECKPOINT_FILES, CONFIG, TOKENIZER_CONFIG, Checkpoint
from ropecli.errors import PatchError
from ropecli.version import VERSION


def patch_to(plan: PatchPlan, output: Path, *, link: bool = True, verify: bool = True) -> int:
    """Writes the patched checkpoint; returns how many live rotary tables proved it (0 without `verify`).

    link: hard-link the weights where the file system can, copy them elsewhere. Raises OutputError, ProofError;
    then nothing is left behind.
    """
    weights = plan.source.weight_files()
    with new_folder(output) as folder:
        write_json(folder / CONFIG, plan.config)
        write_record(folder, plan)
        proved = prove(folder, plan.ropes) if verify else 0
        for file in checkpoint_files(plan.source):
            # Only weights are shared with the source: small files get edited by hand.
            place(file, folder / file.name, link=link and file in weights)
        _write_tokenizer_config(folder, plan)
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


def write_record(folder: Path, plan: PatchPlan) -> None:
    """Writes ropecli.yaml: enough to say what was done, and to go back to the original config."""
    rope = next(rope for label, rope in plan.ropes.items() if sees_whole_context(label))
    record = {
        **read_record(plan.source.folder),  # what else was done to it: a fine-tuning
        "ropecli": VERSION,
        "source": {"checkpoint": plan.source.name, "digest": plan.source.digest()},
        "original_max_position_embeddings": rope.geometry.original_max_position_embeddings,
        "target_length": plan.target_length,
        "scaling": {
            "method": plan.spec.method,
            "factor": float(plan.spec.factor),
            "params": {key: _plain(value) for key, value in plan.spec.params.items()},
        },
        "changes": [change._asdict() for change in diff(plan.original, plan.config)],
    }
    header = "# What ropecli did to this checkpoint; read by it when the checkpoint is patched again.\n"
    text = yaml.safe_dump(record, sort_keys=False, allow_unicode=True)
    (folder / PROVENANCE).write_text(header + text, encoding="utf-8")


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _write_tokenizer_config(folder: Path, plan: PatchPlan) -> None:
    config = plan.source.tokenizer_config
    if config is None:
        return
    longest = config.get("model_max_length")
    if isinstance(longest, int | float) and longest < plan.target_length:
        config["model_max_length"] = plan.target_length
    write_json(folder / TOKENIZER_CONFIG, config)


def checkpoint_files(checkpoint: Checkpoint) -> list[Path]:
    """The files that make up a checkpoint, without config.json and ropecli.yaml, which are always written anew."""
    names_code = checkpoint.config.get("auto_map") or (checkpoint.tokenizer_config or {}).get("auto_map")
    patterns = [*CHECKPOINT_FILES, "*.py"] if names_code else CHECKPOINT_FILES
    files = [file for file in sorted(checkpoint.folder.iterdir()) if file.is_file()]
    files = [file for file in files if file.name not in (CONFIG, PROVENANCE)]
    return [file for file in files if any(fnmatch.fnmatch(file.name, pattern) for pattern in patterns)]


def place(source: Path, target: Path, *, link: bool) -> None:
    """Hard-links where asked and possible, else copies."""
    source = source.resolve()  # the Hub's cache holds links to its blobs
    if link:
        with contextlib.suppress(OSError):
            os.link(source, target)
            return
    shutil.copyfile(source, target)
