"""Reads ropecli.yaml, the record of a patch, and restores the original config from it."""

import copy
import shlex
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ropecli.checkpoint.files import CONFIG, unreadable
from ropecli.checkpoint.opening import Checkpoint
from ropecli.config.changes import ConfigChange, get_path, undo
from ropecli.scaling.registry import find_method
from ropecli.scaling.spec import ScalingSpec, make_spec

_PATCH_KEYS = {"ropecli", "source", "original_max_position_embeddings", "target_length", "scaling", "changes"}
_PATCH_KEYS |= {"tokenizer"}


class Provenance(NamedTuple):
    """The patch recorded in ropecli.yaml.

    original: config.json before any patch. method, factor, params: the scaling in effect, not checked.
    original_length: the pretraining length, tokens. target_length: tokens. edited: keys of config.json changed after
    the patch; if there are any, the record is out of date. tokenizer_lengths: the tokenizer's model_max_length before
    and after, empty if it has none. layer_types: the scaled ones, (None,) if all layers share one rope.
    """

    original: dict[str, Any]
    method: str
    factor: float
    params: dict[str, Any]
    original_length: int
    target_length: int
    edited: tuple[str, ...]
    tokenizer_lengths: tuple[Any, ...]
    layer_types: tuple[str | None, ...]

    def spec(self) -> ScalingSpec:
        """The scaling in effect. Raises MethodError if this release does not support it."""
        return make_spec(self.method, self.factor, self.params)


def read_provenance(checkpoint: Checkpoint) -> Provenance | None:
    """Read the patch in ropecli.yaml; None if there is no file or no patch in it. Raises CheckpointError."""
    record = checkpoint.record
    if "changes" not in record:  # a trained checkpoint that was never patched
        return None
    try:
        changes = [ConfigChange(str(change["path"]), change["before"], change["after"]) for change in record["changes"]]
        scaling = record["scaling"]
        params = {str(key): value for key, value in scaling["params"].items()}
        scaled = str(scaling["method"]), float(scaling["factor"]), params
        lengths = int(record["original_max_position_embeddings"]), int(record["target_length"])
        edited = [change.path for change in changes if get_path(checkpoint.config, change.path) != change.after]
        original = copy.deepcopy(checkpoint.config) if edited else undo(checkpoint.config, changes)
        tokenizer = tuple(record["tokenizer"].get("model_max_length", ()))
        return Provenance(original, *scaled, *lengths, tuple(edited), tokenizer, tuple(scaling["layer_types"]))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise unreadable(checkpoint.folder, error) from error


def entry(record: dict[str, Any], key: str) -> dict[str, Any]:
    """An entry of a record; empty if it is absent or not a mapping."""
    value = record.get(key)
    return value if isinstance(value, dict) else {}


def other_notes(record: dict[str, Any]) -> dict[str, Any]:
    """The entries of a record that are not part of the patch, such as of fine-tuning."""
    return {key: value for key, value in record.items() if key not in _PATCH_KEYS}


def patch_command(
    checkpoint: str,
    revision: str | None,
    method: str,
    factor: float | None,
    params: Mapping[str, object] = MappingProxyType({}),
    *,
    factors_file: object = CONFIG,
    options: Mapping[str, object] = MappingProxyType({}),
) -> str:
    """A `ropecli patch` command, with placeholder DIR for the output folder.

    factors_file: the config.json that has the method's lists. options: further ones; None for a flag.
    """
    # custom is written as longrope, and read back as longrope
    words = ["ropecli", "patch", checkpoint, *(["--revision", revision] if revision else [])]
    words += ["--method", "longrope" if method == "custom" else method]
    if factor is not None:
        short = f"{factor:g}"
        words += ["--factor", short if float(short) == factor else repr(float(factor))]
    if any(isinstance(value, list) for value in params.values()):
        words += ["--factors-file", str(factors_file)]
    else:
        known = find_method(method).signature
        for key, value in params.items():
            if value is not None and value != known[key].default:
                words += ["--set", f"{key}={str(value).lower() if isinstance(value, bool) else value}"]
    for key, value in options.items():
        words += [f"--{key.replace('_', '-')}", *([] if value is None else [str(value)])]
    return shlex.join([*words, "--output", "DIR"])
