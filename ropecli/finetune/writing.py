"""Turns a finished run's folder into a checkpoint: the source's files, with the trained weights in place of its own."""

import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from safetensors import SafetensorError, safe_open

from ropecli.checkpoint.provenance import PROVENANCE, read_record
from ropecli.checkpoint.quiet import quiet_transformers
from ropecli.checkpoint.reading import CONFIG, Checkpoint
from ropecli.checkpoint.writing import place
from ropecli.errors import OutputError
from ropecli.finetune.state import CHECKPOINTS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_RECORD = "finetuned"
_PARTIAL = ".weights.partial"
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


def write_finetuned(checkpoint: Checkpoint, model: "PreTrainedModel", output: Path, asked: dict[str, Any]) -> None:
    """Writes weights in the source's dtype and its other files; config.json last, so that it marks a whole folder.

    Then removes the run's checkpoints. Raises OutputError.
    """
    partial = output / _PARTIAL
    try:
        shutil.rmtree(partial, ignore_errors=True)
        _save_weights(checkpoint, model, partial)
        weights = {file.name for file in checkpoint.weight_files()} | {"model.safetensors.index.json"}
        for file in checkpoint.files():
            if file.name not in weights:
                place(file, output / file.name, link=False)
        for file in partial.glob("model*.safetensors*"):
            shutil.copymode(checkpoint.folder / CONFIG, file)  # safetensors writes for the owner alone
            file.replace(output / file.name)
        _write_record(checkpoint, output, asked)
        place(checkpoint.folder / CONFIG, partial / CONFIG, link=False)
        (partial / CONFIG).replace(output / CONFIG)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"{output} could not be written: {error}. Make room; --resume tries again.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    clear_finished(output)


def clear_finished(output: Path) -> None:
    """Removes what only an unfinished run needs."""
    for name in (CHECKPOINTS, _PARTIAL):
        shutil.rmtree(output / name, ignore_errors=True)


def finished_step(output: Path) -> int | None:
    """How many steps a finished run made; None for one that is not finished."""
    if not (output / CONFIG).is_file():
        return None
    return (read_record(output).get(_RECORD) or {}).get("recipe", {}).get("steps")


def _save_weights(checkpoint: Checkpoint, model: "PreTrainedModel", folder: Path) -> None:
    dtypes = _source_dtypes(checkpoint)
    # for tensors that transformers renames or fuses when it loads them
    usual = Counter(dtypes.values()).most_common(1)[0][0]
    cast: dict[int, torch.Tensor] = {}  # by storage: tied weights stay one tensor, and are written once
    for key, value in model.state_dict().items():
        if key in dtypes or value.data_ptr() not in cast:
            cast[value.data_ptr()] = value.detach().to("cpu", dtypes.get(key, usual))
    state = {key: cast[value.data_ptr()] for key, value in model.state_dict().items()}
    with quiet_transformers():
        model.save_pretrained(folder, state_dict=state)


def _source_dtypes(checkpoint: Checkpoint) -> dict[str, torch.dtype]:
    """Each tensor's own: routers and norms are often kept in float32 beside bfloat16."""
    dtypes = {}
    for path in checkpoint.weight_files():
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  (it is no mapping)
                dtypes[key] = _DTYPES.get(file.get_slice(key).get_dtype(), torch.float32)
    return dtypes


def _write_record(checkpoint: Checkpoint, output: Path, asked: dict[str, Any]) -> None:
    record = {**read_record(checkpoint.folder), _RECORD: asked}
    (output / PROVENANCE).write_text(yaml.safe_dump(record, sort_keys=False, allow_unicode=True), encoding="utf-8")
