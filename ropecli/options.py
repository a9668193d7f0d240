"""The options of the commands, one by one and in groups, and what they stand for.

The option's name follows from the parameter's (max_documents: --max-documents), unless there is a Flag.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Required, TypedDict

from annotated_doc import Doc

from ropecli.errors import MethodError, shown
from ropecli.names import METHODS, check_checkpoint, check_data, check_method, check_picture
from ropecli.signature import Check, Default, Flag, Interval, InTokens, MinLen, OneOf, Only, Panel, token_count

SCALING, DATA, OUTPUT, ENGINE = Panel("Scaling"), Panel("Data"), Panel("Output"), Panel("Engine")
LOADING, SERVER = Panel("Loading"), Panel("Server")
PROTOCOLS = {
    "prefix": "the first N tokens of each document, from one pass",
    "tail": "the same target tokens at every length, with up to N − 1 tokens of context",
    "sliding": "whole documents in windows of N tokens, --stride tokens apart",
    "recall": "what a passage gains from its first occurrence, N tokens back; 1: as much as from a near one",
}
"""The protocols by name, each in a line."""
TOKENS = InTokens()
MODE_RULE = "Default: generate in ruler, as in its paper; rank in the other commands."

IS_CHECKPOINT, IS_METHOD = Check(check_checkpoint), Check(check_method, METHODS)
IS_DATA = Check(check_data)
CheckpointName = Annotated[str, Doc("A folder, a Hub id (owner/name), or 'demo'."), IS_CHECKPOINT]
CheckpointNames = Annotated[
    Sequence[str],
    Flag("checkpoints", metavar="CHECKPOINT"),
    Doc("Folders, Hub ids (owner/name), or 'demo'."),
    IS_CHECKPOINT,
]
Revision = Annotated[str | None, Doc("Branch, tag or commit of a Hub id."), LOADING]
Length = Annotated[int, Interval(ge=1, le=2**24)]
Samples = Annotated[int, Interval(ge=1, le=1_000_000)]

# Outputs
Weights = Annotated[
    str,
    OneOf(("link", "copy")),
    Doc("How to copy unchanged weights: link (hard-link where possible) or copy (always copy)."),
    OUTPUT,
]
Overwrite = Annotated[bool, Doc("Replace an existing file."), OUTPUT]
Resume = Annotated[bool, Doc("Resume an interrupted run of the same --output."), OUTPUT]
Picture = Annotated[
    str | Path | None,
    Flag("--plot", metavar="FILE"),
    Doc("Draw the result: .png, .svg or .pdf."),
    Check(check_picture),
    OUTPUT,
]
_FOLDER = Flag("--output", "-o", metavar="DIR")
OutputFolder = Annotated[str | Path, _FOLDER, Doc("Folder to write."), OUTPUT]
OptionalFolder = Annotated[str | Path | None, _FOLDER, Doc("Folder to write."), OUTPUT]


# Loading
class LoadingOptions(TypedDict, total=False):
    """Options for loading a model."""

    dtype: Annotated[
        str,
        Default("auto"),
        OneOf(("auto", "float32", "fp32", "bfloat16", "bf16", "float16", "fp16")),
        Doc("auto (bfloat16, but float32 on a CPU without it), float32 (fp32), bfloat16 (bf16), float16 (fp16)."),
        LOADING,
    ]
    device: Annotated[
        str, Default("auto"), Doc("auto (CUDA, else MPS, else the CPU), cpu, cuda, cuda:1, mps."), LOADING
    ]
    device_map: Annotated[
        str | None,
        Flag("--device-map", metavar="MAP"),
        OneOf(("auto", "balanced", "balanced_low_0", "sequential")),
        Doc("auto: spread a model that does not fit one device over the GPUs, then the CPU, then the disk."),
        LOADING,
    ]
    max_memory: Annotated[
        str | None,
        Flag("--max-memory", metavar="DEVICE=SIZE,..."),
        Only("device_map"),
        Doc("Memory for weights by GPU number or cpu, such as 0=20GB,cpu=60GB. Default: what is free."),
        LOADING,
    ]
    load_in_8bit: Annotated[bool, Doc("Quantize the weights to 8 bits while loading. Needs bitsandbytes."), LOADING]
    load_in_4bit: Annotated[
        bool, Doc("Quantize the weights to 4 bits (NF4) while loading. Needs bitsandbytes."), LOADING
    ]
    attn: Annotated[
        str,
        Default("auto"),
        OneOf(("auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")),
        Doc("auto (transformers' default), sdpa, eager, flash_attention_2, flash_attention_3, flex_attention."),
        LOADING,
    ]


class ServerOptions(TypedDict, total=False):
    """The way to ask a server."""

    served_name: Annotated[
        str | None, Only("endpoint"), Doc("The model's name at the server. Default: the only one."), SERVER
    ]
    api_key_env: Annotated[
        str | None,
        Flag("--api-key-env", metavar="NAME"),
        Only("endpoint"),
        Doc("Environment variable that holds the API key."),
        SERVER,
    ]
    timeout: Annotated[
        float | None,
        Interval(gt=0, le=86_400),
        Only("endpoint"),
        Doc("Seconds to wait for an answer. Default: 600."),
        SERVER,
    ]


def loading_of(options: LoadingOptions) -> dict[str, Any]:
    """The arguments of load_model. Raises MethodError for options that exclude each other."""
    device, device_map, max_memory = options["device"], options["device_map"], options["max_memory"]
    load_in_8bit, load_in_4bit = options["load_in_8bit"], options["load_in_4bit"]
    for names, are_set in (
        ("--load-in-8bit and --load-in-4bit", load_in_8bit and load_in_4bit),
        ("--device and --device-map", device_map and device != "auto"),
    ):
        if are_set:
            raise MethodError(f"{names} exclude each other. Remove one.")
    loading: dict[str, Any] = {"dtype": options["dtype"], "device": device, "attn": options["attn"]}
    if device_map:
        loading |= {"device_map": device_map, "max_memory": None}
    if device_map and max_memory is not None:
        sizes = re.findall(r"(?:^|,)(\d+|cpu)=(\d+(?:\.\d+)?[KMG]i?B)(?=,|$)", max_memory)
        if len(sizes) != len(max_memory.split(",")):
            raise MethodError(
                f"--max-memory is {max_memory!r}; expected sizes by GPU number or cpu, such as 0=20GB,cpu=60GB."
            )
        loading["max_memory"] = {int(name) if name.isdigit() else name: size for name, size in sizes}
    return {**loading, "bits": 8 if load_in_8bit else 4} if load_in_8bit or load_in_4bit else loading


# Scaling
ScalingFactor = Annotated[float | None, Doc("Target length ÷ pretraining length."), SCALING]
Settings = Annotated[
    Mapping[str, Any] | None, Flag("--set", metavar="KEY=VALUE"), Doc("A parameter of the method; repeatable."), SCALING
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
OriginalLength = Annotated[
    int | None, Interval(ge=1), TOKENS, Doc("True pretraining length, if config.json names another."), SCALING
]


class ParameterOptions(TypedDict, total=False):
    """The parameters of methods."""

    settings: Annotated[SeveralSettings, Only("methods")]
    factors_file: Annotated[FactorsFile, Only("methods")]
    original_length: Annotated[OriginalLength, Only("methods")]


Methods = Annotated[
    Sequence[str] | None,
    Doc("Patch in memory with these methods (see `ropecli methods`), separated by commas; as-is: no patch."),
    IS_METHOD,
    SCALING,
]
Factors = Annotated[
    Sequence[Annotated[float, Interval(gt=0)]] | None,
    MinLen(1),
    Flag("--factors", "-f"),
    Doc("Target length ÷ pretraining length: one factor or several, separated by commas."),
    SCALING,
]


class InMemoryOptions(ParameterOptions, total=False):
    """Patches in memory. Without methods, checkpoints are measured as they are."""

    methods: Methods
    factors: Annotated[Factors, Only("methods")]


# Data
class TextOptions(TypedDict, total=False):
    """The texts of an evaluation."""

    text_column: Annotated[str, Default("text"), Doc("Column of a table that holds the text."), DATA]
    skip_faulty: Annotated[bool, Doc("Skip and count rows without a usable text. Default: refuse the first."), DATA]
    split: Annotated[str | None, Doc("Split of a dataset. Default: test, validation or train."), DATA]


class DocumentOptions(TextOptions, total=False):
    """The documents of an evaluation."""

    data: Required[
        Annotated[
            str,
            Flag("--data", "-d"),
            Doc("'demo', a file or folder of text or rows, or a Hub dataset (owner/name or owner/name:config)."),
            IS_DATA,
            DATA,
        ]
    ]
    max_documents: Annotated[
        int | None,
        Interval(ge=1),
        Doc("Maximum number of documents to read. Default: all; the first 10,000 of a Hub dataset."),
        DATA,
    ]
    max_tokens: Annotated[
        int | None,
        Interval(ge=2),
        TOKENS,
        Only("protocol", ("sliding", "recall")),
        Doc("Maximum tokens to read per document."),
        DATA,
    ]


class MeasuringOptions(LoadingOptions, ServerOptions, total=False):
    """Options of every measurement."""

    endpoint: Annotated[
        str | None,
        Flag("--endpoint", metavar="URL"),
        Doc(
            "Measure what a server computes: one with OpenAI's completions API that takes token ids, such as vLLM. "
            "CHECKPOINT gives tokenizer and lengths."
        ),
        SERVER,
    ]
    engine: Annotated[
        str | None, OneOf(("vllm",)), Doc("Read with another engine than transformers in this process: vllm."), ENGINE
    ]
    engine_arg: Annotated[
        Mapping[str, Any] | None,
        Flag("--engine-arg", metavar="KEY=VALUE"),
        Only("engine"),
        Doc("An argument of vllm.LLM, such as tensor_parallel_size=2; repeatable."),
        ENGINE,
    ]
    requests: Annotated[
        int | None,
        Interval(ge=1, le=1024),
        Only("endpoint"),
        Doc("Requests in flight at the server. Default: 16."),
        SERVER,
    ]

    chunk: Annotated[
        int | None,
        Interval(ge=0),
        TOKENS,
        Doc(
            "Tokens per forward pass, with a KV cache for those before: less memory, more time. 0: all at once. "
            "Default: 1k beyond 32k tokens."
        ),
        LOADING,
    ]
    baseline: Annotated[
        str | None, Doc("Checkpoint to compare with. Default: the first unscaled one, or the first."), IS_CHECKPOINT
    ]
    revision: Revision
    output: Annotated[
        str | Path | None, Flag("--output", "-o", metavar="FILE"), Doc("Write the reports as JSON."), OUTPUT
    ]
    plot: Picture
    resume: Resume
    overwrite: Overwrite


_MODES = OneOf(("rank", "generate"))


def _check_thinking(value: str) -> None:
    if value != "off" and not (isinstance(count := token_count(value), int) and count):
        raise MethodError(f"--thinking is {shown(value)}; expected off, or a number of tokens, such as 2k.")


# Tasks
_Lengths = Annotated[Sequence[Length] | None, MinLen(1), Flag("--lengths", "-l", metavar="TOKENS,...")]


class PerplexityOptions(DocumentOptions, MeasuringOptions, total=False):
    """A measurement of perplexity."""

    lengths: Annotated[
        _Lengths,
        Doc(
            "Context lengths, such as 256,4k,32k. Default: doubling from a quarter of the pretraining length to the "
            "context length, as far as the data has 8 documents of that length."
        ),
    ]
    protocol: Annotated[
        str,
        Default("prefix"),
        OneOf(tuple(PROTOCOLS)),
        Doc(f"{', '.join(PROTOCOLS)}. " + " ".join(f"{name}: {summary}." for name, summary in PROTOCOLS.items())),
    ]
    stride: Annotated[
        int | None,
        Interval(ge=1),
        TOKENS,
        Only("protocol", ("sliding",)),
        Doc("Distance between windows. Default: half of each length."),
    ]
    targets: Annotated[
        int | None,
        Interval(ge=1),
        TOKENS,
        Only("protocol", ("tail",)),
        Doc("Tokens to score per document. Default: half the shortest length."),
    ]
    batch_size: Annotated[int, Default(1), Interval(ge=1), Doc("Windows of the same length per forward pass."), LOADING]
    generate: Annotated[
        bool,
        Only("protocol", ("recall",)),
        Doc(
            "Generate the passage greedily after its cue, for a server that gives no log-probabilities of a "
            "prompt's tokens, such as llama-server."
        ),
    ]


class AskingOptions(InMemoryOptions, TextOptions, MeasuringOptions, total=False):
    """Questions on a long prompt."""

    data: Annotated[
        str,
        Default("demo"),
        Flag("--data", "-d"),
        Doc("Text of the prompts: 'demo', a file or folder of text or rows, or a Hub dataset."),
        IS_DATA,
        DATA,
    ]
    lengths: Annotated[
        _Lengths,
        Doc(
            "Exact lengths of the prompt with its answer, such as 256,4k,32k. Default: doubling from a quarter of the "
            "pretraining length to the context length."
        ),
    ]
    chat_template: Annotated[
        str,
        Default("auto"),
        OneOf(("auto", "none")),
        Doc("auto: ask through the tokenizer's chat template, if it has one. none: plain text."),
    ]
    thinking: Annotated[
        str | None,
        Flag("--thinking", metavar="off|TOKENS"),
        Only("mode", ("generate",)),
        Check(_check_thinking),
        Doc("off: the chat template turns thinking off. TOKENS: longest thought before an answer, beyond the length."),
    ]
    seed: Annotated[int, Default(0), Interval(ge=0), Doc("Random seed of the prompts.")]


class NeedleOptions(AskingOptions, total=False):
    """A search for a key in a prompt."""

    style: Annotated[
        str | None,
        OneOf(("code", "prose", "passkey")),
        Doc(
            "code, prose or passkey. code: AMBER_KEY = 48213 among lines of source, asked by `AMBER_KEY =`. prose: a "
            "sentence and a question. passkey: the pass key of Mohtashami and Jaggi (2023, arXiv:2305.16300), among "
            "repeated sentences instead of --data. Default: code for 'demo' and 'demo-train', else prose."
        ),
    ]
    depths: Annotated[
        Sequence[Annotated[float, Interval(ge=0, le=1)]],
        Default((0, 0.25, 0.5, 0.75, 1)),
        MinLen(1),
        Doc("Where to put the key: 0 is the beginning of the text, 1 its end, right before the question."),
    ]
    samples: Annotated[Samples, Default(5), Doc("Prompts per length and depth.")]
    mode: Annotated[
        str,
        Default("rank"),
        _MODES,
        Doc(
            "rank: the key must have the highest log-probability of ten candidates; works for base models. generate: "
            f"the greedy answer must begin with the key. {MODE_RULE}"
        ),
    ]


RULER_TASKS = (
    *("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe"),
)


class RulerOptions(AskingOptions, total=False):
    """RULER's tasks."""

    tasks: Annotated[
        Sequence[Annotated[str, OneOf(RULER_TASKS)]] | None,
        Flag("--tasks", "-t", metavar="TASK,..."),
        Doc(f"{', '.join(RULER_TASKS)}. Default: all whose prompts fit. RULER also has qa_1 and qa_2."),
    ]
    samples: Annotated[Samples, Default(50), Doc("Prompts per task and length. RULER's tables have 500.")]
    mode: Annotated[
        str,
        Default("generate"),
        _MODES,
        Doc(
            "generate: greedy answers, scored as published. rank: the right answers must have the highest "
            f"log-probabilities among wrong ones; works for base models. {MODE_RULE}"
        ),
    ]
    threshold: Annotated[
        float | None,
        Interval(gt=0, le=1),
        Doc(
            "Mean score that the effective length requires, 0 to 1. Default: 85.6% of the score at the shortest length."
        ),
    ]
    batch_size: Annotated[
        int, Default(1), Interval(ge=1), Only("mode", ("generate",)), Doc("Prompts at once."), LOADING
    ]
