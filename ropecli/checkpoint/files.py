"""Names of the files in a checkpoint folder, and the reader of small files.

A folder may come from an untrusted source. Only regular files are opened, and small files that link out of the folder
are refused: a patch would copy the target, possibly a private file, into its output. Weights may be links, as is
common; their headers are checked.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ropecli.errors import CheckpointError, DataError, RopecliError, first_fault, reason_of, shown
from ropecli.yaml12 import read_own_yaml

CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
PROVENANCE = "ropecli.yaml"
EXTENSION = "extend.json"
RUN, STAGES = "run.yaml", "stages"
README = "README.md"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
WEIGHTS, WHOLE, INDEX = "*.safetensors", "model.safetensors", "model.safetensors.index.json"
_TERMS = ["LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*"]
# Files that are copied to a new folder. Code is copied only if the config refers to it.
CHECKPOINT_FILES = ["*.json", WEIGHTS, "*.model", "*.txt", "*.tiktoken", "*.jinja", "README.md", *_TERMS]
CODE = "*.py"
# Mistral's own format, the whole model a second time. vLLM reads these instead of config.json and its weights, SGLang
# where there are no other weights. A copy beside another config.json would be the model without the patch.
MISTRAL_FORMAT = ["params.json", "consolidated*"]
# Files that are uploaded, in lower case: other JSON and text can be private, or the state of a training run.
PUBLIC_FILES = [
    *(WEIGHTS, "*.safetensors.index.json", CONFIG, "generation_config.json", "configuration.json"),
    *("tokenizer*.json", "*.model", "*.tiktoken", "tekken.json", "*vocab*.json", "*vocab*.txt", "merges*.txt"),
    *("added_tokens.json", "special_tokens_map.json", "emoji.json", "normalizer.json", "chat_template*", "*.jinja"),
    *("*processor*_config.json", "audio_tokenizer_config.json", "*quant*_config.json"),
    *("modules.json", "sentence_*_config.json", "config_sentence_transformers.json"),
    *("readme.md", *map(str.lower, _TERMS), CODE),
]


def is_of_mistral(path: Path) -> bool:
    return any(path.match(pattern) for pattern in MISTRAL_FORMAT)


def weights_in(folder: Path) -> list[Path]:
    """The safetensors files that belong to config.json, by name."""
    return sorted(path for path in folder.glob(WEIGHTS) if not is_of_mistral(path))


def indexed_weights(folder: Path) -> list[str]:
    """The names of the files in model.safetensors.index.json; empty without one. Raises CheckpointError."""
    index = folder / INDEX
    if not is_own_file(index):
        return []
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{index}: weight_map is {shown(listed)}; expected the file of each tensor.")
    return sorted(set(map(str, listed.values())))


def is_file(path: Path) -> bool:
    """Return whether the file exists. Raises CheckpointError if it is not a regular file, OSError."""
    if not (path.exists() or path.is_symlink()):
        return False
    if not path.is_file():
        raise CheckpointError(f"{path} is a folder, pipe, socket, device or broken link; expected a file.")
    return True


def is_own_file(path: Path) -> bool:
    """`is_file` for small files. Raises CheckpointError also for a link out of the folder."""
    if not is_file(path):
        return False
    target = path.resolve()
    if path.is_symlink() and not any(target.is_relative_to(home) for home in _homes(path.parent.resolve())):
        raise CheckpointError(
            f"{path} is a link out of its folder, to {target}; only weights may be linked. "
            "Replace it with a copy, or use the folder that contains the file."
        )
    return True


def _homes(folder: Path) -> list[Path]:
    """Folders that small files may be in: the checkpoint's own and, in the Hub's cache, the blobs."""
    if folder.parent.name != "snapshots" or not folder.parents[1].name.startswith("models--"):
        return [folder]
    # blobs shared by several repositories are one level up: blobs/<two digits>/<hash>
    return [folder, folder.parents[1] / "blobs", folder.parents[2] / "blobs"]


def read_file(path: Path, parse: Callable[[str], Any] = str, kind: type[RopecliError] = DataError) -> Any:
    """Read and parse a file of UTF-8 text. Raises OSError, and `kind`, which names the file, if it cannot be parsed.

    parse: raises ValueError for what it cannot parse.
    """
    try:
        return parse(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        reason = first_fault(error) if hasattr(error, "errors") else reason_of(error)
        raise kind(f"{path} cannot be read: {reason}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a checkpoint. Raises CheckpointError, OSError."""
    is_own_file(path)
    value = read_file(path, json.loads, CheckpointError)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} contains a JSON {type(value).__name__}; expected an object.")
    return value


def read_record(folder: Path) -> dict[str, Any]:
    """Read ropecli.yaml; empty if there is none. Raises CheckpointError."""
    path = folder / PROVENANCE
    record = read_file(path, read_own_yaml, CheckpointError) if is_own_file(path) else {}
    if not isinstance(record, dict):
        raise unreadable(folder, TypeError("it is not a mapping"))
    return record


def unreadable(folder: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{folder / PROVENANCE} cannot be read ({reason_of(error)}). Delete it to use only config.json."
    )
