"""The options for loading a model and for asking a server, and what they stand for."""

import re
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from annotated_doc import Doc

from ropecli.errors import MethodError
from ropecli.signature import Default, Flag, Interval, OneOf, Only, Panel

if TYPE_CHECKING:
    from ropecli.evaluation.endpoint import Endpoint

LOADING, SERVER = Panel("Loading"), Panel("Server")


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
        Default(None),
        Flag("--device-map", metavar="MAP"),
        OneOf(("auto", "balanced", "balanced_low_0", "sequential")),
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
        OneOf(("auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")),
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


def endpoint_of(url: str, options: ServerOptions) -> "Endpoint":
    """Raises EndpointError."""
    from ropecli.evaluation.endpoint import Endpoint

    names = {"served_name": options["served_name"], "key_variable": options["api_key_env"]}
    return Endpoint(url, **names, timeout=options["timeout"] or 600.0)


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
