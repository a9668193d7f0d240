"""Writes a run's result: a whole checkpoint, or an adapter's folder. Also merges an adapter into its base.

A whole checkpoint has the source's files with the trained weights.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import yaml
from safetensors import SafetensorError

from ropecli.atomic import new_folder, refuse_existing
from ropecli.attention import load_model
from ropecli.checkpoint.files import ADAPTER_CONFIG, CONFIG, PROVENANCE, is_own_file, read_json, read_record
from ropecli.checkpoint.opening import Checkpoint, adapter_base, open_checkpoint
from ropecli.checkpoint.writing import TRAINED_AFTER, place, write_json
from ropecli.config.fields import section_of
from ropecli.errors import NotFiniteError, OutputError
from ropecli.live.adapter import ADAPTER_NOTE, Tensors, merge_adapter, only_weights, other_base, read_adapter
from ropecli.live.stock_transformers import quiet_transformers, read_stock_config
from ropecli.live.tensors import named_tensors
from ropecli.messages import warn
from ropecli.training.adapters import adapter_tensors, lora_config, save_adapter
from ropecli.training.sharded_weights import FileTensor, stored_tensors, write_gathered

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_RECORD = "finetuned"
_PARTIAL = ".weights.partial"
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


def write_result(
    checkpoint: Checkpoint,
    model: "PreTrainedModel",
    output: Path,
    settings: dict[str, Any],
    *,
    save: Literal["merged", "adapter"] = "merged",
    state: Tensors | None = None,
    gathered: Iterable[FileTensor] = (),
) -> None:
    """Write a trained model as a whole checkpoint or as an adapter.

    checkpoint: the source. settings: recorded in ropecli.yaml. state: full tensors on the CPU under the model's own
    names, if the model holds shards. gathered: instead of state, (source file, name, full tensor) of all.
    Raises OutputError; CheckpointError if the source no longer exists.
    """
    notes: dict[str, Any] = {_RECORD: settings}
    if gathered:
        write = partial(write_gathered, checkpoint, gathered, _source_dtypes(checkpoint))
    elif not hasattr(model, "peft_config"):
        write = partial(save_weights, checkpoint, model, state=state)
    elif save == "adapter":
        notes[ADAPTER_NOTE] = {"weights": only_weights(checkpoint).digest}
        write = partial(save_adapter, checkpoint, model, state=state)
    else:
        # merge into the weights on disk: a base loaded in 4 bits or bfloat16 is rounded
        base = load_model(checkpoint, dtype="float32", device="cpu")
        merged = merge_adapter(checkpoint, base, lora_config(model), adapter_tensors(model, state))
        write = partial(save_weights, checkpoint, merged)
    _write_folder(output, write, checkpoint, _small_files(checkpoint), checkpoint.folder, notes)


def _small_files(checkpoint: Checkpoint) -> list[Path]:
    """Such as the tokenizer's. Warns of files that are not copied."""
    if warning := checkpoint.skip_warning:
        warn(warning)
    return [file for file in checkpoint.files() if ".safetensors" not in file.name and file.name != ADAPTER_CONFIG]


def _write_folder(
    output: Path,
    write: Callable[[Path], None],
    source: Checkpoint,
    files: Iterable[Path],
    configured: Path,
    notes: dict[str, Any],
) -> None:
    """Fill `output` with the weights that `write` writes, trained from those of `source`, and with copies of `files`.

    configured: the folder that provides config.json and the provenance record. config.json is written last: it marks
    the folder as complete. notes: added to the record. Raises OSError, OutputError, and NotFiniteError for weights
    that are not finite, unless those of the source are not.
    """
    staging = output / _PARTIAL
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        try:
            write(staging)
        except SafetensorError as error:  # not an OSError
            raise OutputError(f"{output} could not be written: {error}. Free disk space.") from error
        _refuse_not_finite(staging.glob("*.safetensors"), source)
        for file in files:
            place(file, output / file.name, link=False)
        for file in [*staging.glob("*.safetensors*"), *staging.glob(ADAPTER_CONFIG)]:
            shutil.copymode(configured / CONFIG, file)  # safetensors makes files readable only by the owner
            file.replace(output / file.name)
        record = {key: value for key, value in read_record(configured).items() if key != ADAPTER_NOTE} | notes
        if "changes" in record:
            record[TRAINED_AFTER] = True
        text = yaml.safe_dump(record, sort_keys=False, allow_unicode=True)
        (output / PROVENANCE).write_text(text, encoding="utf-8")
        place(configured / CONFIG, staging / CONFIG, link=False)
        (staging / CONFIG).replace(output / CONFIG)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _refuse_not_finite(files: Iterable[Path], source: Checkpoint) -> None:
    """Raise NotFiniteError for tensors that are not finite, unless those of the source are not."""
    names = _not_finite(files)
    if names:
        before = _not_finite(source.weight_files())
        names = [name for name in names if name not in before]
    if names:
        more = f" and {len(names) - 1} more tensors are" if len(names) > 1 else " is"
        raise NotFiniteError(
            f"{names[0]}{more} not finite, or too large for the dtype of the weight files. Nothing was written. "
            "Train again with a lower --learning-rate or more warmup_steps."
        )


def _not_finite(paths: Iterable[Path]) -> list[str]:
    """The names of tensors that are not finite, of dtypes that are written."""
    return [
        name
        for _, name, tensor in stored_tensors(paths)
        if tensor.get_dtype() in _DTYPES and not tensor[...].isfinite().all()
    ]


def is_finished(output: Path) -> bool:
    """Return whether the run is finished: config.json is written last."""
    return (output / CONFIG).is_file()


def save_weights(checkpoint: Checkpoint, model: "PreTrainedModel", folder: Path, state: Tensors | None = None) -> None:
    dtypes = _source_dtypes(checkpoint)
    # for tensors that transformers renames or fuses on loading
    most_common = Counter(dtypes.values()).most_common(1)[0][0]
    written: Tensors = {}
    for names, tensor in named_tensors(model):  # tied ones, which are written once, may have one name in `state`
        value = tensor if state is None else next(state[name] for name in names if name in state)
        dtype = next((dtypes[name] for name in names if name in dtypes), most_common)
        cast = value.detach().to("cpu", dtype if value.is_floating_point() else value.dtype)
        written |= dict.fromkeys(names, cast)
    with quiet_transformers():
        model.save_pretrained(folder, state_dict=written)


def _source_dtypes(checkpoint: Checkpoint) -> dict[str, torch.dtype]:
    """The dtype of each tensor of numbers: routers and norms are often float32 in a bfloat16 checkpoint."""
    dtypes = {name: tensor.get_dtype() for _, name, tensor in stored_tensors(checkpoint.weight_files())}
    return {
        name: _DTYPES.get(dtype, torch.float32)
        for name, dtype in dtypes.items()
        if not dtype.startswith(("I", "U", "BOOL"))
    }


def merge_to(
    adapter: Path, output: Path, *, base: str | None = None, revision: str | None = None
) -> tuple[Checkpoint, int]:
    """Write base + adapter as a whole checkpoint, with the adapter's config.json, which includes its RoPE patch.

    base: a checkpoint to use instead of the one named by the adapter. revision: Hub revision of the base. Warns if the
    base's weights differ from those used in training. Returns the opened base, and the number of its matrices that the
    adapter changed. Raises CheckpointError, OutputError.
    """
    refuse_existing(output)
    tensors = read_adapter(adapter)[1]
    source = open_checkpoint(base, weights=True, revision=revision) if base else adapter_base(adapter, revision)
    if warning := other_base(adapter, source):
        warn(warning)
    config = read_json(adapter / CONFIG) if is_own_file(adapter / CONFIG) else source.config
    adapted = Checkpoint(source.name, adapter, config, base=source)
    model = load_model(adapted, dtype="float32", device="cpu")  # merges the adapter
    files = [*_small_files(source), *_small_files(Checkpoint(str(adapter), adapter, {}))]
    notes = {"merged": {"adapter": str(adapter), "base": source.origin()}}
    with new_folder(output) as folder:
        _write_folder(folder, partial(save_weights, source, model), source, files, adapted.configured, notes)
        _note_embeddings(folder, model)
    return source, sum(".lora_A" in name or ".lora_embedding_A" in name for name in tensors)


def _note_embeddings(folder: Path, model: "PreTrainedModel") -> None:
    """Write into config.json what an adapter may have changed: the size of the vocabulary, and an untied head."""
    now, before = model.config.get_text_config(), read_stock_config(folder, str(folder)).get_text_config()
    if (now.vocab_size, now.tie_word_embeddings) == (before.vocab_size, before.tie_word_embeddings):
        return
    config = read_json(folder / CONFIG)
    section = section_of(config)
    if now.vocab_size != before.vocab_size:
        section["vocab_size"] = now.vocab_size
    if now.tie_word_embeddings != before.tie_word_embeddings:
        config["tie_word_embeddings"] = section["tie_word_embeddings"] = now.tie_word_embeddings
    write_json(folder / CONFIG, config)
