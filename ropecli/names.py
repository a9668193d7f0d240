"""Names that a user gives: of checkpoints, sources of documents and scaling methods.

Commands check these names before they import anything that takes time, so that a typo is refused at once.
"""

import re
from pathlib import Path
from typing import NamedTuple, NoReturn

from ropecli import demo
from ropecli.atomic import as_path
from ropecli.errors import CheckpointError, DataError, MethodError, OutputError, did_you_mean

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_DATASET = re.compile(f"({HUB_ID.pattern})(?::(.+))?")
DEMO, DEMO_TRAIN = "demo", "demo-train"
ADAPTERS = {"none": "all parameters", "lora": "LoRA", "lora-plus": "LoRA+", "qlora": "QLoRA"}
"""What each adapter trains, in words."""
AS_IS = "as-is"
METHODS: dict[str, tuple[str, ...]] = {
    "abf": ("rope-theta", "base"),
    "cope": ("clipped-rope",),
    "custom": ("file",),
    "dynamic": ("dynamic-ntk",),
    "dynamic-yarn": (),
    "linear": ("pi", "position-interpolation"),
    "llama3": (),
    "longrope": ("su",),
    "none": (),
    "nope": ("drope",),
    "ntk": ("ntk-aware",),
    "ntk-by-parts": (),
    "p-rope": (),
    "resonance": (),
    "unscaled": (),
    "yarn": (),
    "dual-chunk": ("dca", "chunkllama"),
    "jet-long": ("jetlong",),
    "leaky-rerope": (),
    "lm-infinite": ("lminfinite",),
    "rerope": (),
    "self-extend": ("selfextend", "longlm"),
    "streaming": ("streamingllm", "streaming-llm", "attention-sinks"),
    "string": (),
}
"""The scaling methods and their other names: frequency methods first, then distance methods."""
LENGTH_ONLY = ("none", "unscaled")
"""Methods that need no factor: they set the context length and scale nothing."""


class HubDataset(NamedTuple):
    """config: None for the default configuration."""

    name: str
    config: str | None


def method_name(name: str) -> str:
    """The name of a single method, given by any of its names in any case. Raises MethodError."""
    normalized = name.lower().replace("_", "-")
    for method, others in METHODS.items():
        if normalized == method or normalized in others:
            return method
    raise MethodError(f"Unknown method {name!r}.{did_you_mean(normalized, METHODS)} `ropecli methods` lists all.")


def check_method(name: str) -> None:
    """Raises MethodError for an unknown name, also within a combination such as yarn+resonance."""
    for part in () if name == AS_IS else name.split("+"):
        method_name(part)


def check_checkpoint(name: str) -> None:
    """Raise CheckpointError unless this is a folder with a config.json, a Hub id or `demo`."""
    folder = checkpoint_folder(name)
    if folder and not any((folder / file).exists() for file in ("config.json", "adapter_config.json")):
        refuse_without_config(name, folder)


def checkpoint_folder(name: str | Path) -> Path | None:
    """The folder of a local checkpoint or of `demo`; None if `name` can only be a Hub id. Raises CheckpointError."""
    if str(name) == demo.NAME:
        return demo.FOLDER
    folder = as_path(name)
    if folder.is_dir():
        return folder
    if folder.exists():
        hint = f" {_gguf_hint(folder)}" if folder.suffix == ".gguf" else ""
        raise CheckpointError(f"{name} is a file; expected a folder with config.json.{hint}")
    # runs/typo means a folder if runs/ exists: do not ask the Hub
    if not HUB_ID.fullmatch(str(name)) or folder.parent.is_dir():
        raise CheckpointError(f"No folder {name}. A checkpoint is a folder, a Hub id (owner/name), or 'demo'.")
    return None


def refuse_without_config(name: str | Path, folder: Path) -> NoReturn:
    gguf = next(folder.glob("*.gguf"), None)
    hint = _gguf_hint(gguf) if gguf else "Choose a folder with a checkpoint."
    raise CheckpointError(f"{name}: no config.json in {folder}. {hint}")


def _gguf_hint(file: Path) -> str:
    return (
        f"{file} is a GGUF file, for llama.cpp. Patch the Hugging Face checkpoint that it was made from, then convert "
        f"the patched folder: `ropecli export DIR --engine llama.cpp` prints the commands."
    )


def locate(source: str) -> Path | HubDataset:
    """The file, folder or Hub dataset that SOURCE names, unless it is the demo's text. Raises DataError."""
    path = as_path(source)
    if path.is_file() or (path.is_dir() and source):
        return path
    if not path.parent.is_dir() and (hub := _HUB_DATASET.fullmatch(source)):
        return HubDataset(hub[1], hub[2])
    raise DataError(f"No file or folder {source}. Give a file, a folder, 'demo', 'demo-train' or a Hub dataset id.")


def check_data(source: str) -> None:
    """Raise DataError unless this names a file, a folder, a Hub dataset or the demo's text."""
    if source not in (DEMO, DEMO_TRAIN):
        locate(source)


def refuse_held_out(source: str) -> None:
    if source == DEMO:
        raise DataError("'demo' is the held-out text for eval-ppl. Use 'demo-train' for training.")


def check_picture(path: str) -> None:
    """Raise OutputError unless a figure can be written in the format of this ending."""
    if Path(path).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise OutputError(f"{path} does not end in .png, .svg or .pdf.")
