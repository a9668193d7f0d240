"""Load a checkpoint's model and tokenizer with stock transformers."""

import logging
import re
from collections.abc import Callable, Mapping
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ropecli.checkpoint.files import TOKENIZER_CONFIG
from ropecli.checkpoint.opening import Checkpoint
from ropecli.config.fields import section_of
from ropecli.config.saved_remapping import read_saved_remapping
from ropecli.errors import CheckpointError, reason_of, shortened
from ropecli.live.adapter import merge_adapter, other_base, read_adapter
from ropecli.live.devices import emulates_bfloat16
from ropecli.live.stock_transformers import (
    auto_class_of,
    quiet_transformers,
    read_stock_config,
    reason_of_stock,
    refuse_encoder,
)
from ropecli.messages import warn
from ropecli.ranks import read_ranks

DTYPES = {name: name for name in ("auto", "float32", "bfloat16", "float16")}
DTYPES |= {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Dtypes by the names that users may write."""
_FEW_TOKENS = 0.9


def choose_device(name: str = "auto") -> str:
    """Resolve 'auto' (CUDA, else MPS, else the CPU) and, in a multi-process launch, 'cuda' to the GPU of this process.

    Raises CheckpointError if the device is not available.
    """
    launch = read_ranks()
    gpu = "cuda" if launch.count == 1 else f"cuda:{launch.local_rank}"
    if name == "auto":
        if torch.cuda.is_available():
            return gpu
        return "mps" if torch.backends.mps.is_available() else "cpu"
    if name == "cuda":
        name = gpu
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = f"--device {name} is not available to torch {torch.__version__} on this machine."
        raise CheckpointError(reason) from error
    return name


def resolve_dtype_and_device(dtype: str = "auto", device: str = "auto") -> tuple[str, str]:
    """Resolve 'auto' (dtype: float32 on a CPU, else bfloat16) and short dtype names. Raises CheckpointError."""
    device, dtype = choose_device(device), DTYPES.get(dtype, dtype)
    if dtype == "auto":
        dtype = "float32" if device.startswith("cpu") else "bfloat16"
    return dtype, device


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: str = "auto",
    device: str = "auto",
    attn: str = "auto",
    device_map: str | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    bits: int | None = None,
    options: Mapping[str, Any] | None = None,
    say: Callable[[str], None] | None = None,
):
    """Load the model with all of its parts in evaluation mode, each weight straight to its device. Merge an adapter.

    dtype: 'auto' is float32 on a CPU and bfloat16 elsewhere. The rotary tables always stay in float32, because the
    dtype is set at loading and not cast afterwards. attn: the attention implementation; 'auto' is the default of
    transformers, or the distance method in config.json, for which only 'auto' is allowed. device_map: of
    Accelerate; `device` is then ignored. max_memory: with a device_map, memory to use by GPU number or 'cpu'; the rest
    is read from disk when needed. bits: 8 or 4 to quantize with bitsandbytes. options: further arguments of
    from_pretrained; a device_map replaces `device`. say: called if the files contain tensors that config.json does not
    use; without `say` this is an error, because a checkpoint written from this model would lack them. Raises
    CheckpointError for an encoder, and for missing weights, which stock transformers would initialize randomly.
    """
    checkpoint.weight_files()
    config = read_stock_config(checkpoint.configured, checkpoint.name)
    refuse_encoder(config, checkpoint.name)
    saved = read_saved_remapping(checkpoint.config)
    requested, (dtype, device) = dtype, resolve_dtype_and_device(dtype, device)
    if _quantized_with(checkpoint) in ("fp8", "mxfp8") and device == "cpu":  # transformers makes it bfloat16 there
        dtype = "bfloat16" if requested == "auto" else dtype
        if dtype != "bfloat16":
            raise CheckpointError(f"{checkpoint.name} is quantized with fp8. On a CPU it needs dtype bfloat16 or auto.")
    if dtype == "bfloat16" and device == "cpu" and emulates_bfloat16():
        warn("This CPU has no bfloat16 arithmetic; float32 is many times faster: --dtype float32.")
    _refuse_quantization(checkpoint, bits)
    if device_map and _quantized_with(checkpoint) == "compressed-tensors":  # it replaces Accelerate's hooks
        raise CheckpointError(
            f"{checkpoint.name} is quantized with compressed-tensors, which needs one device. Remove --device-map."
        )
    if checkpoint.base and (bits or device_map):
        raise CheckpointError(
            f"{checkpoint.name} is an adapter, which is merged on one device without quantization. Run `ropecli merge` "
            "first."
        )
    options = {**_placement(dtype, device, device_map, max_memory, bits), **(options or {})}
    # for weights on disk that differ from those in the files, such as fused experts
    spill = TemporaryDirectory(prefix="ropecli-") if device_map else None
    if checkpoint.base:
        adapter = read_adapter(checkpoint.folder)  # before the base, which may take minutes
        options["config"] = config
    try:
        with quiet_transformers():
            loaded: Any = auto_class_of(config).from_pretrained(
                (checkpoint.base or checkpoint).folder,
                dtype=getattr(torch, dtype),
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **({} if attn == "auto" else {"attn_implementation": attn}),
                **({"offload_folder": spill.name} if spill else {}),
                **options,
            )
    except Exception as error:  # damaged weights and configs raise many kinds of errors
        reason = reason_of_stock(error)
        if isinstance(error, NotImplementedError):  # transformers fails to compare tied weights of other shapes
            reason = "its tied weights have other shapes than config.json implies."
        raise CheckpointError(f"{checkpoint.name} cannot be loaded: {reason}") from error
    model, loading_info = loaded
    if saved is not None and model.config.get_text_config()._attn_implementation != saved.attention:
        raise CheckpointError(
            f"{checkpoint.name}: transformers does not use the attention set in config.json, {saved.attention}. It "
            "needs attn auto."
        )
    _check_weights(checkpoint, loading_info, say)
    if spill:
        model.spill = spill  # removed with the model
    if checkpoint.base:
        if say and (warning := other_base(checkpoint.folder, checkpoint.base)):
            say(warning)
        model = merge_adapter(checkpoint, model, *adapter)
    return model.eval()


def is_quantized(model: Any) -> bool:
    """Return whether the model computes with quantized weights, which round like half precision."""
    return getattr(model, "hf_quantizer", None) is not None


def _quantized_with(checkpoint: Checkpoint) -> str | None:
    """The quant_method of config.json. None for weights that are not quantized."""
    config = checkpoint.config.get("quantization_config")
    return str(config.get("quant_method", "bitsandbytes")) if isinstance(config, dict) and config else None


def _placement(
    dtype: str, device: str, device_map: str | None, max_memory: Mapping[int | str, int | str] | None, bits: int | None
) -> dict[str, Any]:
    """The arguments of from_pretrained that say where weights go, and in how many bits."""
    from transformers import BitsAndBytesConfig

    placed: dict[str, Any] = {"device_map": device_map or {"": device}}
    if device_map:
        placed["max_memory"] = dict(max_memory) if max_memory else None
    if bits == 8:
        # it warns in every forward pass that inputs are cast to float16
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        placed["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True)
    elif bits == 4:
        placed["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=getattr(torch, dtype)
        )
    return placed


def _refuse_quantization(checkpoint: Checkpoint, bits: int | None) -> None:
    """Raise CheckpointError for weights that are quantized already, or by a method unknown to transformers."""
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    method = _quantized_with(checkpoint)
    if method and bits:
        raise CheckpointError(f"{checkpoint.name} is already quantized with {method}. Remove --load-in-{bits}bit.")
    if method and not any(known.startswith(method) for known in AUTO_QUANTIZER_MAPPING):
        raise CheckpointError(f"{checkpoint.name} is quantized with {method!r}, which transformers does not support.")


def _check_weights(checkpoint: Checkpoint, loading_info: Mapping[str, Any], say: Callable[[str], None] | None) -> None:
    """Check that files and model have the same tensors. loading_info: of transformers. say: see load_model."""
    what = f"The adapter {checkpoint.folder} does not fit {checkpoint.name}" if checkpoint.base else checkpoint.name
    if mismatched := loading_info.get("mismatched_keys"):
        name, there, expected = sorted(mismatched)[0]
        raise CheckpointError(f"{what}: {name} has shape {tuple(there)}; config.json implies {tuple(expected)}.")
    if missing := loading_info.get("missing_keys"):
        raise CheckpointError(f"{what}: {sorted(missing)[0]} is missing in the weight files.")
    if unused := sorted(
        name for name in loading_info.get("unexpected_keys", ()) if not _is_mtp(name, checkpoint.config)
    ):
        names = shortened(", ".join(unused), 200)
        message = f"{what}: {len(unused)} tensors of the weight files are not used by config.json: {names}."
        if say is None:
            raise CheckpointError(f"{message} Fix config.json (num_hidden_layers, biases) or remove these tensors.")
        say(message)


def _is_mtp(name: str, config: dict[str, Any]) -> bool:
    """Return whether a tensor belongs to a multi-token prediction layer, which stock transformers does not run.

    transformers ignores these layers by their number in the published checkpoint, which differs for other sizes.
    """
    section = section_of(config)
    layers, extra = section.get("num_hidden_layers"), section.get("num_nextn_predict_layers")
    number = re.search(r"\blayers\.(\d+)\.", name)
    if number and isinstance(layers, int) and isinstance(extra, int):
        return layers <= int(number[1]) < layers + extra
    return False


def load_tokenizer(checkpoint: Checkpoint):
    """Load the tokenizer. Raises CheckpointError if the folder has none that transformers can read."""
    from transformers import AutoTokenizer

    known = ("tokenizer.json", TOKENIZER_CONFIG, "tokenizer.model", "vocab.json")
    homes = (checkpoint.folder, checkpoint.configured)
    folder = next((home for home in homes if any((home / name).is_file() for name in known)), None)
    if folder is None:
        raise CheckpointError(f"{checkpoint.name}: no tokenizer in {checkpoint.folder}; expected {' or '.join(known)}.")
    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # tokenizers raise many kinds of errors
        raise CheckpointError(f"{checkpoint.name}: the tokenizer cannot be loaded: {reason_of(error)}") from error


def vocabulary_mismatch(tokenizer, model) -> str | None:
    """Return a warning if the vocabulary sizes do not match. A few spare rows in the model are normal."""
    known, rows = len(tokenizer), int(model.get_input_embeddings().weight.shape[0])
    if known > rows:
        return f"The tokenizer has {known} tokens, the model {rows}. Texts with larger ids cannot be read."
    if known < _FEW_TOKENS * rows:
        return f"The tokenizer has {known} tokens, the model {rows}. Check that the tokenizer belongs to this model."
    return None
