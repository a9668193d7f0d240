"""Names of the files in a checkpoint folder, and safe reading of the small ones.

A folder may come from an untrusted source. Only regular files are opened, JSON is limited in size and depth, and small
files that link out of the folder are refused: a patch would copy the target, possibly a private file, into its output.
Weights may be links, as is common; their headers are checked.
"""

import json
import stat
from pathlib import Path
from typing import Any

from ropecli.errors import CheckpointError, reason_of
from ropecli.yaml12 import BoundedLoader, read_yaml, values

CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
PROVENANCE = "ropecli.yaml"
TUNING = "tune.json"
FACTORS = "factors.json"
RUN, STAGES = "run.yaml", "stages"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
WEIGHTS = "*.safetensors"
_TERMS = ["LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*"]
# Files that are copied to a new folder. Code is copied only if the config refers to it.
CHECKPOINT_FILES = ["*.json", WEIGHTS, "*.model", "*.txt", "*.tiktoken", "*.jinja", "README.md", *_TERMS]
CODE = "*.py"
# Mistral's own format, the whole model a second time. vLLM reads these in place of config.json and its weights, SGLang
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
LARGEST_JSON = 32 * 2**20
_LARGEST_RECORD = 2**18  # bytes; PyYAML parses about 100 KB per second


def is_of_mistral(path: Path) -> bool:
    return any(path.match(pattern) for pattern in MISTRAL_FORMAT)


def weights_in(folder: Path) -> list[Path]:
    """The safetensors files that belong to config.json, by name."""
    return sorted(path for path in folder.glob(WEIGHTS) if not is_of_mistral(path))


def is_file(path: Path) -> bool:
    """Return whether the file exists. Raises CheckpointError if it is not a regular file or cannot be accessed."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError) and not path.is_symlink():
            return False
        raise CheckpointError(f"{path} cannot be read: {error.strerror}. Download or copy it again.") from error
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, socket or device"
        raise CheckpointError(f"{path} is {kind}; expected a file.")
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


def read_text(path: Path, largest: int) -> str:
    """Read a small file of a checkpoint. Raises CheckpointError, and the errors of read_bounded.

    largest: maximum size, bytes.
    """
    if not is_own_file(path):
        raise FileNotFoundError(f"{path.name} does not exist")
    return read_bounded(path, largest)


def read_bounded(path: Path, largest: int) -> str:
    """Read the text of a file or a pipe. Raises OSError, and ValueError if it is too long or not UTF-8.

    largest: maximum size, bytes.
    """
    with path.open("rb") as file:
        data = file.read(largest + 1)  # the size reported by the file system can be wrong
    if len(data) > largest:
        raise ValueError(f"it is larger than {largest >> 10} KiB")
    return data.decode("utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises CheckpointError for a file that is too large, not JSON, or not an object."""
    try:
        value = json.loads(read_text(path, LARGEST_JSON))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} contains a JSON {type(value).__name__}; expected an object.")
    try:
        for _ in values(value):
            pass
    except ValueError as error:
        raise CheckpointError(f"{path} is invalid: {error}.") from error
    return value


def read_record(folder: Path) -> dict[str, Any]:
    """Read ropecli.yaml; empty if there is none. Raises CheckpointError."""
    path = folder / PROVENANCE
    if not is_own_file(path):
        return {}
    try:
        record = read_yaml(read_text(path, _LARGEST_RECORD), BoundedLoader)
    except (OSError, ValueError) as error:
        raise unreadable(folder, error) from error
    if not isinstance(record, dict):
        raise unreadable(folder, TypeError("it is not a mapping"))
    return record


def unreadable(folder: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{folder / PROVENANCE} cannot be read ({reason_of(error)}). Delete it to use only config.json."
    )
