"""Turns a finished run's folder into a checkpoint: the source's files, with the trained weights in place of its own."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from safetensors import SafetensorError

from ropecli.checkpoint.provenance import PROVENANCE, read_record
from ropecli.checkpoint.quiet import quiet_transformers
from ropecli.checkpoint.reading import CONFIG, Checkpoint, section_of
from ropecli.checkpoint.writing import checkpoint_files, place
from ropecli.errors import OutputError
from ropecli.finetune.state import CHECKPOINTS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_RECORD = "finetuned"


def write_finetuned(checkpoint: Checkpoint, model: "PreTrainedModel", output: Path, asked: dict[str, Any]) -> None:
    """Writes weights in the source's dtype and its other files; config.json last, so that it marks a whole folder.

    Then removes the run's checkpoints. Raises OutputError.
    """
    partial = output / ".weights.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        _save_weights(checkpoint, model, partial)
        weights = {file.name for file in checkpoint.weight_files()} | {"model.safetensors.index.json"}
        for file in checkpoint_files(checkpoint):
            if file.name not in weights:
                place(file, output / file.name, link=False)
        for file in partial.glob("model*.safetensors*"):
            file.replace(output / file.name)
        _write_record(checkpoint, output, asked)
        place(checkpoint.folder / CONFIG, partial / CONFIG, link=False)
        (partial / CONFIG).replace(output / CONFIG)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"{output} could not be written: {error}. Make room; --resume tries again.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(output / CHECKPOINTS, ignore_errors=True)


def finished_step(output: Path) -> int | None:
    """How many steps a finished run made; None for one that is not finished."""
    if not (output / CONFIG).is_file():
        return None
    return (read_record(output).get(_RECORD) or {}).get("recipe", {}).get("steps")


def _save_weights(checkpoint: Checkpoint, model: "PreTrainedModel", folder: Path) -> None:
    section = section_of(checkpoint.config)
    name = section.get("dtype") or section.get("torch_dtype") or checkpoint.config.get("dtype") or "float32"
    dtype = getattr(torch, str(name), torch.float32)
    cast: dict[int, torch.Tensor] = {}  # by storage: tied weights stay one tensor, and are written once
    for value in model.state_dict().values():
        cast.setdefault(value.data_ptr(), value.detach().to("cpu", dtype))
    state = {key: cast[value.data_ptr()] for key, value in model.state_dict().items()}
    with quiet_transformers():
        model.save_pretrained(folder, state_dict=state)


def _write_record(checkpoint: Checkpoint, output: Path, asked: dict[str, Any]) -> None:
    record = {**read_record(checkpoint.folder), _RECORD: asked}
    (output / PROVENANCE).write_text(yaml.safe_dump(record, sort_keys=False, allow_unicode=True), encoding="utf-8")
