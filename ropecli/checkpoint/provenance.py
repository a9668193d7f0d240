"""ropecli.yaml, the note beside the weights: what was done to what. Owns the way back to the original config."""

import copy
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ropecli.checkpoint.files import PROVENANCE, is_own_file, read_text, values
from ropecli.checkpoint.opening import Checkpoint
from ropecli.config.changes import ConfigChange, get_path, put_in_order, undo
from ropecli.errors import CheckpointError, reason_of
from ropecli.scaling.spec import ScalingSpec, make_spec

_OF_A_PATCH = {
    "ropecli",
    "source",
    "original_max_position_embeddings",
    "target_length",
    "scaling",
    "changes",
    "key_order",
    "tokenizer",
}
_TUNED = "tuned"
_LARGEST_RECORD = 2**18  # bytes; yaml reads some 100 KB a second
_MOST_VALUES = 20_000


class Provenance(NamedTuple):
    """What ropecli.yaml says.

    original: config.json as it was before any patch. method, factor, params: the scaling in effect, not checked.
    original_length: the pretraining length, tokens. target_length: the length patched for. edited: keys of config.json
    that were changed since; where there are any, the note no longer tells what is in effect. tokenizer_lengths: the
    tokenizer's model_max_length before and after, empty where it has none, None where an older note does not say.
    layer_types: those that were scaled, (None,) where all layers share one rope; None where an older note does not
    say, which means those that see the whole context.
    """

    original: dict[str, Any]
    method: str
    factor: float
    params: dict[str, Any]
    original_length: int
    target_length: int
    edited: tuple[str, ...]
    tokenizer_lengths: tuple[Any, ...] | None = None
    layer_types: tuple[str | None, ...] | None = None

    def spec(self) -> ScalingSpec:
        """The scaling in effect. Raises MethodError for one that this release does not know."""
        return make_spec(self.method, self.factor, self.params)


def read_provenance(checkpoint: Checkpoint) -> Provenance | None:
    """None where there is no ropecli.yaml, or none of a patch. Its edited: what was changed in config.json since.

    Raises CheckpointError for a ropecli.yaml that cannot be read.
    """
    record = read_record(checkpoint.folder)
    if "changes" not in record:  # written beside a checkpoint that was trained, and never patched
        return None
    try:
        changes = [ConfigChange(str(change["path"]), change["before"], change["after"]) for change in record["changes"]]
        scaling = record["scaling"]
        params = {str(key): value for key, value in scaling["params"].items()}
        scaled = str(scaling["method"]), float(scaling["factor"]), params
        layer_types = tuple(scaling["layer_types"]) if "layer_types" in scaling else None
        lengths = int(record["original_max_position_embeddings"]), int(record["target_length"])
        if min(lengths) < 1:
            raise ValueError(f"lengths of {lengths[0]} and {lengths[1]} tokens")
        edited = [change.path for change in changes if get_path(checkpoint.config, change.path) != change.after]
        original = copy.deepcopy(checkpoint.config)
        if not edited:
            original = put_in_order(undo(original, changes), record.get("key_order") or {})
        tokenizer = record.get("tokenizer")
        known = None if tokenizer is None else tuple(tokenizer.get("model_max_length", ()))
        if known and len(known) != 2:
            raise ValueError("model_max_length has no before and after")
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise unreadable(checkpoint.folder, error) from error
    return Provenance(original, *scaled, *lengths, tuple(edited), known, layer_types)


def read_record(folder: Path) -> dict[str, Any]:
    """ropecli.yaml as it stands; empty where there is none. Raises CheckpointError."""
    path = folder / PROVENANCE
    if not is_own_file(path):
        return {}
    try:
        record = yaml.load(read_text(path, _LARGEST_RECORD), Loader=_BoundedLoader)
        # what an alias repeats counts each time, as it would be written
        if any(True for _ in itertools.islice(values(record), _MOST_VALUES, None)):
            raise ValueError(f"it holds more than {_MOST_VALUES} values")
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise unreadable(folder, error) from error
    if not isinstance(record, dict):
        raise unreadable(folder, TypeError("it holds no mapping"))
    return record


def other_notes(record: dict[str, Any]) -> dict[str, Any]:
    """What a record says beside the patch: a fine-tuning, or a tuning of the weights; one of constants is the patch."""
    notes = {key: value for key, value in record.items() if key not in _OF_A_PATCH}
    if not tuned_weights(record):
        notes.pop(_TUNED, None)
    return notes


def tuned_weights(record: dict[str, Any]) -> bool:
    """Whether the weights hold what `ropecli tune` learned."""
    tuned = record.get(_TUNED)
    return isinstance(tuned, dict) and bool(tuned.get("weights_changed"))


def untuned(record: dict[str, Any]) -> str:
    """The checkpoint whose weights were tuned, as it was named then, for the end of a message."""
    return str(record[_TUNED].get("checkpoint"))


def tuned_for(record: dict[str, Any]) -> str:
    """The scaling that the weights were tuned for, in a line."""
    return str(record[_TUNED].get("scaling"))


class _BoundedLoader(yaml.SafeLoader):
    """YAML's plain values, without merge keys: a few lines of them can stand for billions of values."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
            raise ValueError("merge keys (<<) are not read")


def unreadable(folder: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{folder / PROVENANCE} cannot be read ({reason_of(error)}). Remove it to go by config.json alone."
    )
