"""Options that several commands share: types with their help, and groups of options that commands take together.

The option's name follows from the parameter's (max_documents: --max-documents), unless there is a Flag.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Required, TypedDict

from annotated_doc import Doc
from annotated_types import Ge, Gt, Interval, Le, MinLen

from ropecli.atomic import as_path as as_path
from ropecli.atomic import optional_path as optional_path
from ropecli.atomic import refuse_existing
from ropecli.commands.signature import Default, Flag, InTokens, Only, Panel
from ropecli.errors import MethodError, OutputError
from ropecli.evaluation.protocols import PROTOCOLS

if TYPE_CHECKING:
    from ropecli.data.sources import Source
    from ropecli.evaluation.endpoint import Endpoint
    from ropecli.evaluation.subject import ReaderFactory
    from ropecli.evaluation.tasks.retrieval import RetrievalChoice
    from ropecli.evaluation.texts import TextChoice

SCALING, DATA, LOADING, OUTPUT = Panel("Scaling"), Panel("Data"), Panel("Loading"), Panel("Output")
SERVER, ENGINE = Panel("Server"), Panel("Engine")
TOKENS = InTokens()
_WHOLE = Only("protocol", ("sliding", "disjoint", "yarn", "recall"))
MODE_RULE = "Default: generate in ruler, as in its paper; rank in the other commands."

CheckpointName = Annotated[str, Doc("A folder, a Hub id (owner/name), or 'demo'.")]
CheckpointNames = Annotated[
    Sequence[str], Flag("checkpoints", metavar="CHECKPOINT..."), Doc("Folders, Hub ids (owner/name), or 'demo'.")
]
Revision = Annotated[str | None, Doc("Branch, tag or commit of a Hub id."), LOADING]
Length = Annotated[int, Interval(ge=1, le=2**24)]
Samples = Annotated[int, Interval(ge=1, le=1_000_000)]

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
    int | None, Ge(1), TOKENS, Doc("True pretraining length, if config.json names another."), SCALING
]
Weights = Annotated[
    str, Doc("How to copy unchanged weights: link (hard-link where possible) or copy (always copy)."), OUTPUT
]


class StudyOptions(TypedDict, total=False):
    """The scaling of methods whose frequencies are computed."""

    factor: Annotated[ScalingFactor, Default(None)]
    settings: Annotated[SeveralSettings, Default(None)]
    factors_file: Annotated[FactorsFile, Default(None)]
    original_length: Annotated[OriginalLength, Default(None)]
    revision: Annotated[Revision, Default(None)]


class ParameterOptions(TypedDict, total=False):
    """The parameters of methods."""

    settings: Annotated[SeveralSettings, Default(None), Only("methods")]
    factors_file: Annotated[FactorsFile, Default(None), Only("methods")]
    original_length: Annotated[OriginalLength, Default(None), Only("methods")]


_METHODS = Doc("Patch in memory with these methods (see `ropecli methods`), separated by commas; as-is: no patch.")
_FACTORS = Doc("Target length ÷ pretraining length: one factor or several, separated by commas.")
_FACTORS_FLAG = Flag("--factors", "-f")
Factor = Annotated[float, Gt(0)]
Methods = Annotated[Sequence[str], _METHODS, SCALING]
Factors = Annotated[Sequence[Factor], MinLen(1), _FACTORS_FLAG, _FACTORS, SCALING]


class InMemoryOptions(ParameterOptions, total=False):
    """Patches in memory. Without methods, checkpoints are measured as they are."""

    methods: Annotated[Sequence[str] | None, Default(None), _METHODS, SCALING]
    factors: Annotated[
        Sequence[Factor] | None, Default(None), MinLen(1), Only("methods"), _FACTORS_FLAG, _FACTORS, SCALING
    ]


# Data
DatasetConfig = Annotated[
    str | None,
    Default(None),
    Only("data"),
    Flag("--dataset-config", metavar="NAME"),
    Doc("Configuration of a Hub dataset."),
    DATA,
]


class TextOptions(TypedDict, total=False):
    """The text of a source. `split` is not here, since its default differs between commands."""

    text_column: Annotated[str, Default("text"), Doc("Column of a table that holds the text."), DATA]
    dataset_config: DatasetConfig
    skip_faulty: Annotated[
        bool, Default(False), Doc("Skip and count rows without a usable text. Default: refuse the first."), DATA
    ]


class EvalTextOptions(TextOptions, total=False):
    """The texts of an evaluation."""

    split: Annotated[str | None, Default(None), Doc("Split of a dataset. Default: test, validation or train."), DATA]


class DocumentOptions(EvalTextOptions, total=False):
    """The documents of an evaluation."""

    data: Required[
        Annotated[
            str,
            Flag("--data", "-d"),
            Doc("'demo', a file or folder of text or rows, or a Hub dataset (owner/name or owner/name:config)."),
            DATA,
        ]
    ]
    max_documents: Annotated[
        int | None,
        Default(None),
        Ge(1),
        Doc("Maximum number of documents to read. Default: all; the first 10,000 of a Hub dataset."),
        DATA,
    ]
    min_tokens: Annotated[
        int | None,
        Default(None),
        Ge(2),
        TOKENS,
        _WHOLE,
        Doc("Skip documents with fewer tokens."),
        DATA,
    ]
    max_tokens: Annotated[
        int | None,
        Default(None),
        Ge(2),
        TOKENS,
        _WHOLE,
        Doc("Maximum tokens to read per document."),
        DATA,
    ]


# Loading, output
class LoadingOptions(TypedDict, total=False):
    """Options for loading a model."""

    dtype: Annotated[
        str,
        Default("auto"),
        Doc("auto (float32 on a CPU, else bfloat16), float32 (fp32), bfloat16 (bf16), float16 (fp16)."),
        LOADING,
    ]
    device: Annotated[
        str, Default("auto"), Doc("auto (CUDA, else MPS, else the CPU), cpu, cuda, cuda:1, mps."), LOADING
    ]
    device_map: Annotated[
        str | None,
        Default(None),
        Flag("--device-map", metavar="MAP"),
        Doc("auto: spread a model that does not fit one device over the GPUs, then the CPU, then the disk."),
        LOADING,
    ]
    max_memory: Annotated[
        str | None,
        Default(None),
        Flag("--max-memory", metavar="DEVICE=SIZE,..."),
        Only("device_map"),
        Doc("Memory for weights by GPU number or cpu, such as 0=20GB,cpu=60GB. Default: what is free."),
        LOADING,
    ]
    load_in_8bit: Annotated[
        bool, Default(False), Doc("Quantize the weights to 8 bits while loading. Needs bitsandbytes."), LOADING
    ]
    load_in_4bit: Annotated[
        bool, Default(False), Doc("Quantize the weights to 4 bits (NF4) while loading. Needs bitsandbytes."), LOADING
    ]
    attn: Annotated[
        str,
        Default("auto"),
        Doc("auto (transformers' default), sdpa, eager, flash_attention_2, flash_attention_3, flex_attention."),
        LOADING,
    ]


class EndpointOptions(TypedDict, total=False):
    """A server instead of a model in this process."""

    endpoint: Annotated[
        str | None,
        Default(None),
        Flag("--endpoint", metavar="URL"),
        Doc(
            "Measure what a server computes: one with OpenAI's completions API that takes token ids, such as vLLM. "
            "CHECKPOINT gives tokenizer and lengths."
        ),
        SERVER,
    ]


class ServerOptions(TypedDict, total=False):
    """The way to ask a server."""

    served_name: Annotated[
        str | None,
        Default(None),
        Only("endpoint"),
        Doc("The model's name at the server. Default: the only one."),
        SERVER,
    ]
    api_key_env: Annotated[
        str | None,
        Default(None),
        Flag("--api-key-env", metavar="NAME"),
        Only("endpoint"),
        Doc("Environment variable that holds the API key."),
        SERVER,
    ]
    timeout: Annotated[
        float | None,
        Default(None),
        Interval(gt=0, le=86_400),
        Only("endpoint"),
        Doc("Seconds to wait for one whole answer. Default: 600."),
        SERVER,
    ]


class MeasuringOptions(LoadingOptions, EndpointOptions, ServerOptions, total=False):
    """Options of every measurement."""

    engine: Annotated[
        str | None,
        Default(None),
        Doc("Read with another engine than transformers in this process: vllm."),
        ENGINE,
    ]
    engine_arg: Annotated[
        Mapping[str, Any] | None,
        Default(None),
        Flag("--engine-arg", metavar="KEY=VALUE"),
        Only("engine"),
        Doc("An argument of vllm.LLM, such as tensor_parallel_size=2; repeatable."),
        ENGINE,
    ]
    requests: Annotated[
        int | None,
        Default(None),
        Interval(ge=1, le=1024),
        Only("endpoint"),
        Doc("Requests in flight at the server. Default: 16."),
        SERVER,
    ]

    chunk: Annotated[
        int | None,
        Default(None),
        Ge(0),
        TOKENS,
        Doc(
            "Tokens per forward pass, with a KV cache for those before: less memory, more time. 0: all at once. "
            "Default: 1k beyond 32k tokens."
        ),
        LOADING,
    ]
    baseline: Annotated[
        str | None,
        Default(None),
        Doc("Checkpoint to compare with, as it is. Default: the first unscaled one of those that are measured."),
    ]
    revision: Annotated[Revision, Default(None)]
    output: Annotated[
        str | Path | None,
        Default(None),
        Flag("--output", "-o", metavar="FILE"),
        Doc("Write the reports as JSON."),
        OUTPUT,
    ]
    plot: Annotated[
        str | Path | None,
        Default(None),
        Flag("--plot", metavar="FILE"),
        Doc("Draw the result: .png, .svg or .pdf."),
        OUTPUT,
    ]
    resume: Annotated[bool, Default(False), Doc("Resume an interrupted run of the same --output."), OUTPUT]
    overwrite: Annotated[bool, Default(False), Doc("Replace the report and plot of a finished run."), OUTPUT]


Resume = Annotated[bool, Doc("Resume an interrupted run of the same --output."), OUTPUT]
ChatTemplate = Annotated[str, Doc("auto: ask through the tokenizer's chat template, if it has one. none: plain text.")]


# Tasks
class PerplexityOptions(MeasuringOptions, total=False):
    """A measurement of perplexity."""

    lengths: Annotated[
        Sequence[Length] | None,
        Default(None),
        MinLen(1),
        Flag("--lengths", "-l", metavar="TOKENS,..."),
        Doc(
            "Context lengths, such as 256,4k,32k. Default: doubling from a quarter of the pretraining length to the "
            "context length, as far as the data has 8 documents of that length."
        ),
    ]
    protocol: Annotated[
        str, Default("prefix"), Doc(" ".join(f"{name}: {protocol.summary}." for name, protocol in PROTOCOLS.items()))
    ]
    stride: Annotated[
        int | None,
        Default(None),
        Ge(1),
        TOKENS,
        Only("protocol", ("sliding",)),
        Doc("Distance between windows. Default: half of each length."),
    ]
    targets: Annotated[
        int | None,
        Default(None),
        Ge(1),
        TOKENS,
        Only("protocol", ("tail",)),
        Doc("Tokens to score per document. Default: half the shortest length."),
    ]
    evaluator: Annotated[
        str | None,
        Default(None),
        Only("protocol", ("longppl",)),
        Doc("Checkpoint, with the same tokenizer, that finds the key tokens. Compare only results of one."),
    ]
    keys: Annotated[
        str | Path | None,
        Default(None),
        Flag("--keys", metavar="FILE"),
        Only("protocol", ("longppl",)),
        Doc("File of key tokens to read; with --evaluator, to write if it does not exist."),
    ]
    batch_size: Annotated[int, Default(1), Ge(1), Doc("Windows of the same length per forward pass."), LOADING]
    generate: Annotated[
        bool,
        Default(False),
        Only("protocol", ("recall",)),
        Doc(
            "Generate the passage greedily after its cue, for a server that gives no log-probabilities of a "
            "prompt's tokens, such as llama-server."
        ),
    ]


class SearchOptions(MeasuringOptions, total=False):
    """A search for a key in a prompt."""

    lengths: Annotated[
        Sequence[Length] | None,
        Default(None),
        MinLen(1),
        Flag("--lengths", "-l", metavar="TOKENS,..."),
        Doc(
            "Exact lengths of the prompt with its answer, such as 256,4k,32k. Default: doubling from a quarter of the "
            "pretraining length to the context length."
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
        Doc(
            "rank: the key must have the highest log-probability among --candidates; works for base models. generate: "
            f"the greedy answer must begin with the key. {MODE_RULE}"
        ),
    ]
    candidates: Annotated[
        int | None,
        Default(None),
        Ge(2),
        Le(1000),
        Only("mode", ("rank",)),
        Doc("Number of candidates: the key, those of other needles, and random ones. Default: 10, at most 1000."),
    ]
    chat_template: Annotated[ChatTemplate, Default("auto")]
    seed: Annotated[int, Default(0), Ge(0), Doc("Random seed of keys and texts.")]


# Training
RecipeFile = Annotated[
    str | Path | None,
    Flag("--recipe", "-r", metavar="NAME|FILE"),
    Doc("A recipe that `ropecli recipe` lists, or a YAML file."),
]
OutputFolder = Annotated[str | Path, Flag("--output", "-o", metavar="DIR"), Doc("Folder to write."), OUTPUT]


def with_config(data: str, config: str | None) -> str:
    """The source owner/name:config."""
    return data if config is None else f"{data}:{config}"


def reader_factory_of(options: MeasuringOptions, batch_size: int = 1, *model_options: object) -> "ReaderFactory":
    """A model in this process, or a server. model_options: further ones that need a model here; None if not set.

    Raises MethodError for options that exclude each other, EndpointError for a server that cannot be used.
    """
    loading, url, engine = loading_of(options), options["endpoint"], options["engine"]
    if engine not in (None, "vllm") or (engine and url):
        raise MethodError(f"--engine is {engine!r}; expected vllm, without --endpoint.")
    if url is None and engine is None:
        from ropecli.evaluation.subject import LiveReaderFactory

        return LiveReaderFactory(loading, chunk=options["chunk"], batch_size=batch_size)
    arguments = dict(options["engine_arg"] or {})
    if engine and (dtype := loading.pop("dtype")) != "auto":
        arguments["dtype"] = dtype
    if (
        any(
            value not in ("auto", None)
            for value in (*loading.values(), options["chunk"], options["baseline"], *model_options)
        )
        or batch_size > 1
    ):
        raise MethodError(
            f"With {'--engine' if engine else '--endpoint'} ropecli loads no model. Remove the options for loading, "
            "--chunk, --batch-size, --baseline and --evaluator."
        )
    if url is None:
        from ropecli.engines.engine_export import vllm_overrides
        from ropecli.evaluation.readers.vllm import VllmReaderFactory

        return VllmReaderFactory(arguments, vllm_overrides)
    endpoint = endpoint_of(url, options)

    from ropecli.evaluation.readers.endpoint import EndpointReaderFactory

    return EndpointReaderFactory(endpoint, in_flight=options["requests"] or 16)


def endpoint_of(url: str, options: ServerOptions) -> "Endpoint":
    """Raises EndpointError."""
    from ropecli.evaluation.endpoint import Endpoint

    names = {"served_name": options["served_name"], "key_variable": options["api_key_env"]}
    return Endpoint(url, **names, timeout=options["timeout"] or 600.0)


def texts_of(options: DocumentOptions) -> "TextChoice":
    from ropecli.evaluation.texts import TextChoice

    names = ("max_documents", "min_tokens", "max_tokens")
    source = source_of(options["data"], options, options["split"])
    return TextChoice(source, **{name: options[name] for name in names})  # type: ignore[literal-required]


def source_of(data: str, options: TextOptions, split: str | None) -> "Source":
    from ropecli.data.sources import Source

    place = with_config(data, options["dataset_config"])
    return Source(place, options["text_column"], split, skip_faulty=options["skip_faulty"])


def retrieval_of(options: SearchOptions, num_needles: int = 1) -> "RetrievalChoice":
    """num_needles: number of needles. Raises MethodError."""
    from ropecli.evaluation.tasks.retrieval import RetrievalChoice

    names = ("lengths", "depths", "samples", "mode", "candidates", "chat_template", "seed")
    return RetrievalChoice(**{name: options[name] for name in names}, num_needles=num_needles)  # type: ignore[literal-required]


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


def is_link(weights: str) -> bool:
    """Whether to hard-link unchanged weights. Raises MethodError for anything but link and copy."""
    if weights not in ("link", "copy"):
        raise MethodError(f"--weights is {weights!r}; expected 'link' or 'copy'.")
    return weights == "link"


def folder_to_write(output: str | Path | None, *, dry_run: bool) -> Path | None:
    """The new folder, None for a dry run. Raises OutputError without an output, and for one that exists."""
    if dry_run:
        return None
    if output is None:
        raise OutputError("Set --output DIR, the folder to write, or --dry-run.")
    refuse_existing(folder := as_path(output))
    return folder
