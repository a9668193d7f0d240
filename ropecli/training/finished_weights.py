"""Writes what a run trained: a whole checkpoint, or an adapter's folder. Also merges an adapter into its base.

A whole checkpoint is the source's files with the trained weights in place of its own.
"""

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import yaml
from safetensors import SafetensorError, safe_open

from ropecli.atomic import naming, new_folder, refuse_existing
from ropecli.attention import load_model
from ropecli.checkpoint.files import ADAPTER_CONFIG, is_own_file
from ropecli.checkpoint.opening import CONFIG, Checkpoint, adapter_base, open_checkpoint
from ropecli.checkpoint.provenance import PROVENANCE, read_record
from ropecli.checkpoint.writing import place
from ropecli.errors import OutputError, reason_of
from ropecli.live.adapter import ADAPTER_NOTE, Tensors, merge_adapter, other_base, read_adapter, weights_digest
from ropecli.live.stock_transformers import quiet_transformers
from ropecli.training.adapters import adapter_tensors, all_names, lora_config, save_adapter
from ropecli.training.recipe import Recipe
from ropecli.training.run_folder import CHECKPOINTS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_RECORD = "finetuned"
_PARTIAL = ".weights.partial"
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


def write_result(
    checkpoint: Checkpoint,
    model: "PreTrainedModel",
    recipe: Recipe,
    output: Path,
    settings: dict[str, Any],
    state: Tensors | None = None,
) -> None:
    """Writes what the recipe's `save` asks for of a trained `model`: a whole checkpoint, or an adapter's folder.

    checkpoint: what was trained from. state: full tensors on the CPU by the model's own names, where an engine has
    left shards in the model. Then removes the run's checkpoints. Raises OutputError; CheckpointError where the source
    has gone meanwhile.
    """
    notes: dict[str, Any] = {_RECORD: settings}
    if recipe.adapter == "none":
        save = partial(save_weights, checkpoint, model, state=state)
    elif recipe.save == "adapter":
        notes[ADAPTER_NOTE] = {"weights": weights_digest(checkpoint)}
        save = partial(save_adapter, checkpoint, model, state=state)
    else:
        # onto the weights of the files: a base in 4 bits, or in bfloat16, would leave its rounding behind
        base = load_model(checkpoint, dtype="float32", device="cpu")
        merged = merge_adapter(checkpoint, base, lora_config(model), adapter_tensors(model, state))
        save = partial(save_weights, checkpoint, merged)
    try:
        write_with_source_files(checkpoint, output, notes, save)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error  # the whole error may name the folder that is filled first
        raise OutputError(f"{output} could not be written: {why}. Make room; --resume tries again.") from error
    clear_finished(output)


def write_with_source_files(
    checkpoint: Checkpoint, output: Path, notes: dict[str, Any], save: Callable[[Path], None]
) -> None:
    """What `save` writes into a folder, moved into `output`; beside it the source's files but its weights.

    config.json comes last, so it marks a whole folder. notes: for the record, beside what the source's says. Raises
    OSError, SafetensorError.
    """
    filled = output / _PARTIAL
    try:
        shutil.rmtree(filled, ignore_errors=True)
        filled.mkdir(parents=True)
        save(filled)
        weights = {file.name for file in checkpoint.weight_files()} | {"model.safetensors.index.json"}
        for file in checkpoint.files():
            if file.name not in weights:
                place(file, output / file.name, link=False)
        for file in [*filled.glob("*.safetensors*"), *filled.glob(ADAPTER_CONFIG)]:
            shutil.copymode(checkpoint.folder / CONFIG, file)  # safetensors writes for the owner alone
            file.replace(output / file.name)
        _write_record(checkpoint, output, notes)
        place(checkpoint.folder / CONFIG, filled / CONFIG, link=False)
        (filled / CONFIG).replace(output / CONFIG)
    finally:
        shutil.rmtree(filled, ignore_errors=True)


def _write_record(checkpoint: Checkpoint, output: Path, notes: dict[str, Any]) -> None:
    before = {key: value for key, value in read_record(checkpoint.folder).items() if key != ADAPTER_NOTE}
    record = before | notes
    (output / PROVENANCE).write_text(yaml.safe_dump(record, sort_keys=False, allow_unicode=True), encoding="utf-8")


def clear_finished(output: Path) -> None:
    """Removes what only an unfinished run needs."""
    for name in (CHECKPOINTS, _PARTIAL):
        shutil.rmtree(output / name, ignore_errors=True)


def finished_step(output: Path) -> int | None:
    """How many steps a finished run made; None for one that is not finished."""
    if not (output / CONFIG).is_file():
        return None
    return (read_record(output).get(_RECORD) or {}).get("recipe", {}).get("steps")


def save_weights(checkpoint: Checkpoint, model: "PreTrainedModel", folder: Path, state: Tensors | None = None) -> None:
    dtypes = _source_dtypes(checkpoint)
    # for tensors that transformers renames or fuses when it loads them
    usual = Counter(dtypes.values()).most_common(1)[0][0]
    given = model.state_dict() if state is None else _tied_again(model, state)
    cast: dict[int, torch.Tensor] = {}  # by storage: tied weights stay one tensor, and are written once
    for key, value in given.items():
        if key in dtypes or value.data_ptr() not in cast:
            cast[value.data_ptr()] = value.detach().to("cpu", dtypes.get(key, usual))
    written = {key: cast[value.data_ptr()] for key, value in given.items()}
    with quiet_transformers():
        model.save_pretrained(folder, state_dict=written)


def _tied_again(model: "PreTrainedModel", state: Tensors) -> Tensors:
    """Gathered from shards, what was one tensor may have come back as two, or under one of its names alone."""
    tied: Tensors = {}
    for _, names in all_names(model):
        if len(names) > 1:
            tied |= dict.fromkeys(names, next(state[name] for name in names if name in state))
    return {**state, **tied}


def _source_dtypes(checkpoint: Checkpoint) -> dict[str, torch.dtype]:
    """Each tensor's own: routers and norms are often kept in float32 beside bfloat16."""
    dtypes = {}
    for path in checkpoint.weight_files():
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  (it is no mapping)
                dtypes[key] = _DTYPES.get(file.get_slice(key).get_dtype(), torch.float32)
    return dtypes


class Merge(NamedTuple):
    """What was merged: the base as it was opened, and how many of its matrices got an adapter's."""

    base: Checkpoint
    matrices: int


def merge_to(
    adapter: Path,
    output: Path,
    *,
    base: str | None = None,
    revision: str | None = None,
    say: Callable[[str], None] = lambda message: None,
) -> Merge:
    """Writes base + adapter as a whole checkpoint, with the adapter's config.json, and so with its RoPE patch.

    base: a checkpoint in place of the one that the adapter names; revision: of a Hub id. `say` is told where the
    base's weights are not those that the adapter was trained beside. Raises CheckpointError, OutputError.
    """
    refuse_existing(output)
    config, tensors = read_adapter(adapter)
    source = open_checkpoint(base, weights=True, revision=revision) if base else adapter_base(adapter, revision)
    if warning := other_base(adapter, source):
        say(warning)
    with _with_files_of(source, adapter) as whole:
        model = merge_adapter(whole, load_model(whole, dtype="float32", device="cpu"), config, tensors)
        notes = {"merged": {"adapter": str(adapter), "base": source.origin()}}
        with new_folder(output) as folder:
            try:
                write_with_source_files(whole, folder, notes, partial(save_weights, whole, model))
            except SafetensorError as error:
                raise OutputError(f"{output} could not be written: {error}. Make room.") from error
    return Merge(source, sum(".lora_A" in name or ".lora_embedding_A" in name for name in tensors))


@contextmanager
def _with_files_of(source: Checkpoint, adapter: Path) -> Iterator[Checkpoint]:
    """For as long as it takes, a folder of links to the base's weights, with copies of the small files: the base's
    where the adapter has none of its own. Raises OutputError."""
    with ExitStack() as stack:
        try:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ropecli-merge-")))
            files = _fill(folder, source, adapter)
        except OSError as error:
            raise OutputError(
                f"The temporary folder could not be written: {reason_of(error)}. Make room there, or set the "
                "environment variable TMPDIR to a folder that can be written to."
            ) from error
        with naming({**{folder / name: file for name, file in files.items()}, folder: source.folder}):
            yield Checkpoint(source.name, folder, open_checkpoint(folder).config)


def _fill(folder: Path, source: Checkpoint, adapter: Path) -> dict[str, Path]:
    """The files that it put there, by their names."""
    own = Checkpoint(str(adapter), adapter, {})
    files = {file.name: file for file in source.files()}
    files |= {file.name: file for file in own.files() if file.suffix != ".safetensors" and file.name != ADAPTER_CONFIG}
    configured = adapter if is_own_file(adapter / CONFIG) else source.folder
    files |= {name: configured / name for name in (CONFIG, PROVENANCE) if is_own_file(configured / name)}
    weights = source.weight_files()
    for name, file in files.items():
        if file in weights:
            (folder / name).symlink_to(file.resolve())
        else:
            place(file, folder / name, link=False)
    return files
