"""Options that several commands share: type, help and panel.

The option's name follows from the parameter's (max_documents: --max-documents), unless there is a Flag.
"""

import errno
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_doc import Doc
from annotated_types import Ge

from ropecli.errors import MethodError, OutputError, shown
from ropecli.evaluation.protocol_descriptions import PROTOCOLS


@dataclass(frozen=True)
class Flag:
    """How the command line spells an option: Flag("--set", "-s"). metavar: the placeholder for its value in help."""

    name: str
    short: str | None = None
    metavar: str | None = None


@dataclass(frozen=True)
class Panel:
    """The group of options in which help lists an option."""

    title: str


@dataclass(frozen=True)
class TokenCount:
    """Marks a number of tokens, which the command line reads with suffixes: 4k is 4,096, 1M is 1,048,576."""


SCALING, DATA, LOADING, OUTPUT = Panel("Scaling"), Panel("Data"), Panel("Loading"), Panel("Output")
TOKENS = TokenCount()

Checkpoint = Annotated[str, Doc("A folder, a Hub id (owner/name), or 'demo'.")]
Revision = Annotated[str | None, Doc("Branch, tag or commit of a Hub id."), LOADING]

# Scaling
Factor = Annotated[float | None, Doc("Target length ÷ pretraining length."), SCALING]
Settings = Annotated[
    Mapping[str, Any] | None,
    Flag("--set", metavar="KEY=VALUE"),
    Doc("A parameter of the method; repeatable."),
    SCALING,
]
SeveralSettings = Annotated[
    Mapping[str, Any] | None,
    Flag("--set", metavar="[METHOD.]KEY=VALUE"),
    Doc("A parameter of one of the methods; repeatable."),
    SCALING,
]
FactorsFile = Annotated[
    str | Path | None,
    Doc(
        "JSON file with the factors of longrope or custom: a list, an object with long_factor, factors or inv_freq, "
        "or a config.json that has them."
    ),
    SCALING,
]
InMemory = Annotated[
    str | None,
    Doc("Patch the model in memory with this method (see `ropecli methods`); needs --factor."),
    SCALING,
]
OriginalLength = Annotated[
    int | None, Ge(1), TOKENS, Doc("True pretraining length, if config.json names another."), SCALING
]
Weights = Annotated[
    str, Doc("How to copy unchanged weights: link (hard-link where possible) or copy (always copy)."), OUTPUT
]

# Evaluation
Data = Annotated[str, Flag("--data", "-d"), Doc("'demo', a file or folder of text or rows, or a Hub dataset id."), DATA]
Lengths = Annotated[
    Sequence[int] | None,
    Flag("--lengths", "-l", metavar="TOKENS,..."),
    Doc(
        "Context lengths, such as 256,4k,32k. Default: doubling from a quarter of the pretraining length to the "
        "context length, as far as the data has 8 documents of that length."
    ),
]
ProtocolName = Annotated[str, Doc(" ".join(f"{name}: {protocol.summary}." for name, protocol in PROTOCOLS.items()))]
Stride = Annotated[int | None, Ge(1), TOKENS, Doc("sliding: distance between windows. Default: half of each length.")]
Targets = Annotated[
    int | None, Ge(1), TOKENS, Doc("tail: tokens to score per document. Default: half the shortest length.")
]
Evaluator = Annotated[
    str | None, Doc("longppl: checkpoint that finds the key tokens. Compare models only with the same evaluator.")
]
KeysFile = Annotated[
    str | Path | None,
    Flag("--keys", metavar="FILE"),
    Doc("longppl: file of key tokens to read; with --evaluator, to write if it does not exist."),
]
MaxDocuments = Annotated[
    int | None,
    Ge(1),
    Doc("Maximum number of documents to read. Default: all; the first 10,000 of a Hub dataset."),
    DATA,
]
MinTokens = Annotated[
    int | None, Ge(2), TOKENS, Doc("sliding, disjoint, yarn: skip documents with fewer tokens."), DATA
]
MaxTokens = Annotated[
    int | None, Ge(2), TOKENS, Doc("sliding, disjoint, yarn: maximum tokens to read per document."), DATA
]
TextColumn = Annotated[str, Doc("Column of a table that holds the text."), DATA]
DatasetConfig = Annotated[
    str | None, Flag("--dataset-config", metavar="NAME"), Doc("Configuration of a Hub dataset, such as en."), DATA
]
Split = Annotated[str | None, Doc("Split of a Hub dataset. Default: test, validation or train."), DATA]
Chunk = Annotated[
    int | None,
    Ge(0),
    TOKENS,
    Doc(
        "Tokens per forward pass, with a KV cache for those before: less memory, more time. 0: all at once. Default: "
        "1k beyond 32k tokens."
    ),
    LOADING,
]
BatchSize = Annotated[int, Ge(1), Doc("Windows of the same length per forward pass."), LOADING]
Dtype = Annotated[
    str, Doc("auto (float32 on a CPU, else bfloat16), float32 (fp32), bfloat16 (bf16), float16 (fp16)."), LOADING
]
Device = Annotated[str, Doc("auto (CUDA, else MPS, else the CPU), cpu, cuda, cuda:1, mps."), LOADING]
DeviceMap = Annotated[
    str | None,
    Flag("--device-map", metavar="MAP"),
    Doc("auto: spread a model that does not fit one device over the GPUs, then the CPU, then the disk."),
    LOADING,
]
MaxMemory = Annotated[
    str | None,
    Flag("--max-memory", metavar="DEVICE=SIZE,..."),
    Doc("With --device-map: memory for weights by GPU number or cpu, such as 0=20GB,cpu=60GB. Default: what is free."),
    LOADING,
]
LoadIn8bit = Annotated[bool, Doc("Quantize the weights to 8 bits while loading. Needs bitsandbytes."), LOADING]
LoadIn4bit = Annotated[bool, Doc("Quantize the weights to 4 bits (NF4) while loading. Needs bitsandbytes."), LOADING]
Attn = Annotated[
    str,
    Doc("auto (transformers' default), sdpa, eager, flash_attention_2, flash_attention_3, flex_attention."),
    LOADING,
]
ReportFile = Annotated[
    str | Path | None, Flag("--output", "-o", metavar="FILE"), Doc("Write the report as JSON."), OUTPUT
]
Resume = Annotated[bool, Doc("Resume an interrupted run of the same --output."), OUTPUT]

# Retrieval
PromptLengths = Annotated[
    Sequence[int] | None,
    Flag("--lengths", "-l", metavar="TOKENS,..."),
    Doc(
        "Exact lengths of the prompt with its answer, such as 256,4k,32k. Default: doubling from a quarter of the "
        "pretraining length to the context length."
    ),
]
Depths = Annotated[
    Sequence[float],
    Doc("Where to put the key: 0 is the beginning of the text, 1 its end, right before the question."),
]
Trials = Annotated[int, Ge(1), Doc("Prompts per length and depth.")]
Mode = Annotated[
    str,
    Doc(
        "rank: the key must have the highest log-probability among --candidates; works for base models. generate: the "
        "greedy answer must begin with the key."
    ),
]
Candidates = Annotated[
    int | None,
    Ge(2),
    Doc("rank: number of candidates: the key, those of other needles, and random ones. Default: 10, at most 1000."),
]
Seed = Annotated[int, Ge(0), Doc("Random seed of keys and texts.")]
ChatTemplate = Annotated[str, Doc("auto: ask through the tokenizer's chat template, if it has one. none: plain text.")]
PlotFile = Annotated[
    str | Path | None, Flag("--plot", metavar="FILE"), Doc("Plot to draw: .png, .svg or .pdf."), OUTPUT
]

# Training
RecipeFile = Annotated[
    str | Path | None,
    Flag("--recipe", "-r", metavar="NAME|FILE"),
    Doc("A recipe that `ropecli recipe` lists, or a YAML file."),
]
OutputFolder = Annotated[str | Path, Flag("--output", "-o", metavar="DIR"), Doc("Folder to write."), OUTPUT]


def sorted_numbers(numbers: Sequence[Any], option: str) -> list[Any]:
    """Removes repeats and sorts. Raises MethodError for an empty list or a number that is not positive."""
    found = sorted(set(numbers))
    if not found or not all(0 < number < math.inf for number in found):
        raise MethodError(f"{option} is {shown(list(numbers))}; expected positive numbers, such as 256,512.")
    return found


def with_config(data: str, config: str | None) -> str:
    """The source owner/name:config. Raises MethodError if --data is not a Hub dataset without a configuration."""
    if config is None:
        return data
    from ropecli.data.sources import is_hub_dataset

    if not is_hub_dataset(data) or ":" in data:
        raise MethodError(f"--dataset-config is {config!r}, but --data is {data!r}; expected a Hub id, owner/name.")
    return f"{data}:{config}"


def loading_of(
    dtype: str,
    device: str,
    attn: str,
    device_map: str | None,
    max_memory: str | None,
    load_in_8bit: bool,
    load_in_4bit: bool,
) -> dict[str, Any]:
    """The arguments of load_model. Raises MethodError for options that exclude each other."""
    if load_in_8bit and load_in_4bit:
        raise MethodError("--load-in-8bit and --load-in-4bit exclude each other. Remove one.")
    if device_map and device != "auto":
        raise MethodError(f"--device {device} and --device-map {device_map} exclude each other. Remove one.")
    if device_map and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise MethodError("--device-map spreads the model of one process over all GPUs. Start one process only.")
    if max_memory and not device_map:
        raise MethodError("--max-memory needs --device-map auto.")
    loading: dict[str, Any] = {"dtype": dtype, "device": device, "attn": attn}
    if device_map:
        loading |= {"device_map": device_map, "max_memory": _sizes(max_memory)}
    return {**loading, "bits": 8 if load_in_8bit else 4} if load_in_8bit or load_in_4bit else loading


def _sizes(max_memory: str | None) -> dict[int | str, str] | None:
    """'0=20GB,cpu=60GB' as Accelerate's max_memory. Raises MethodError."""
    if max_memory is None:
        return None
    found = re.findall(r"(?:^|,)(\d+|cpu)=(\d+(?:\.\d+)?[KMG]i?B)(?=,|$)", max_memory)
    if len(found) != len(max_memory.split(",")):
        raise MethodError(
            f"--max-memory is {max_memory!r}; expected sizes by GPU number or cpu, such as 0=20GB,cpu=60GB."
        )
    return {int(name) if name.isdigit() else name: size for name, size in found}


def as_path(path: str | Path) -> Path:
    """Expand `~`: no shell does it in `--output=~/x`. Raises OutputError for a name that is too long."""
    # Path.expanduser raises for an unknown user
    expanded = Path(os.path.expanduser(path))  # noqa: PTH111
    try:
        expanded.stat()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise OutputError(f"{shown(str(path))} is not a path: {error.strerror}.") from error
    return expanded


def optional_path(path: str | Path | None) -> Path | None:
    return None if path is None else as_path(path)


def is_link(weights: str) -> bool:
    """Whether to hard-link unchanged weights. Raises MethodError for anything but link and copy."""
    if weights not in ("link", "copy"):
        raise MethodError(f"--weights is {weights!r}; expected 'link' or 'copy'.")
    return weights == "link"


def listed(values: Any) -> list[Any]:
    """Return a list of one value or several."""
    return [values] if isinstance(values, str | Path) else list(values)
