"""Makes an adapter and its base one whole checkpoint."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError

from ropecli.atomic import naming, new_folder, refuse_existing
from ropecli.checkpoint.files import CONFIG, PROVENANCE, is_own_file
from ropecli.checkpoint.provenance import read_record
from ropecli.checkpoint.reading import Checkpoint, open_checkpoint
from ropecli.checkpoint.writing import place
from ropecli.errors import CheckpointError, OutputError, reason_of
from ropecli.finetune.adapter_files import (
    ADAPTER_CONFIG,
    ADAPTER_NOTE,
    adapter_base,
    merged,
    read_adapter,
    weights_digest,
)
from ropecli.finetune.writing import save_weights, write_beside


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
    named, pinned = adapter_base(config)
    if base is None and not named:
        raise CheckpointError(f"{adapter}: {ADAPTER_CONFIG} names no base. Name it: --base CHECKPOINT.")
    source = open_checkpoint(base or str(named), weights=True, revision=revision or (None if base else pinned))
    record = read_record(adapter)
    trained_beside = (record.get(ADAPTER_NOTE) or {}).get("weights")
    if trained_beside and trained_beside != weights_digest(source):
        say(f"the adapter was trained beside other weights than those of {source.name}.")
    with _with_files_of(source, adapter) as whole:
        model = merged(whole, config, tensors)
        notes = {"merged": {"adapter": str(adapter), "base": source.origin()}}
        with new_folder(output) as folder:
            try:
                write_beside(whole, folder, notes, lambda partial: save_weights(whole, model, partial))
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
