"""Makes an adapter and its base one whole checkpoint."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError

from ropecli.atomic import naming, new_folder, refuse_existing
from ropecli.checkpoint.files import ADAPTER_CONFIG, CONFIG, PROVENANCE, is_own_file
from ropecli.checkpoint.opening import Checkpoint, adapter_base, open_checkpoint
from ropecli.checkpoint.writing import place
from ropecli.errors import OutputError, reason_of
from ropecli.live.adapter import merge_adapter, other_base, read_adapter
from ropecli.live.loading import load_model
from ropecli.training.writing import save_weights, write_beside


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
