"""Load a checkpoint's model and tokenizer with stock transformers."""

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from ropecli.checkpoint.opening import Checkpoint
from ropecli.config.fields import section_of
from ropecli.config.saved_remapping import read_saved_remapping
from ropecli.errors import CheckpointError, reason_of
from ropecli.live.stock_transformers import quiet_transformers, reason_of_stock

DTYPES = {
    "auto": "auto",
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
}
"""Dtypes by the names that users may write."""
ATTENTION = ("auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")
_FEW_TOKENS = 0.9


def choose_device(name: str = "auto") -> str:
    """Resolve 'auto' (a GPU if available) and, in a multi-process launch, 'cuda' to the GPU of this process.

    Raises CheckpointError if the device is not available.
    """
    import torch

    own = os.environ.get("LOCAL_RANK")
    gpu = "cuda" if own is None else f"cuda:{own}"
    if name == "auto":
        return gpu if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = gpu
    try:
        if torch.device(name).type != "meta":
            torch.zeros(1, device=name).item()
            return name
    except (RuntimeError, AssertionError, NotImplementedError):
        pass
    raise CheckpointError(f"--device {name} is not available to torch {torch.__version__} on this machine.")


def settle(dtype: str = "auto", device: str = "auto") -> tuple[str, str]:
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
    options: Mapping[str, Any] | None = None,
    say: Callable[[str], None] | None = None,
):
    """Load the causal LM in evaluation mode. An adapter is merged into its base.

    dtype: 'auto' is float32 on a CPU and bfloat16 elsewhere. The rotary tables always stay in float32, because the
    dtype is set at loading and not cast afterwards. attn: the attention implementation; 'auto' is the default of
    transformers, or the distance method in config.json, for which only 'auto' is allowed. options: further arguments of
    from_pretrained; with a device_map, `device` is ignored. say: called if the files contain tensors that config.json
    does not use; without `say` this is an error, because a checkpoint written from this model would lack them. Raises
    CheckpointError, also for missing weights, which stock transformers would initialize randomly.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    checkpoint.weight_files()
    saved = read_saved_remapping(checkpoint.config)
    if saved is not None and attn != "auto":
        raise CheckpointError(
            f"{checkpoint.name} uses the attention of {saved.method}; attn {attn!r} would replace it. Use attn auto."
        )
    dtype, device = settle(dtype, device)
    options, adapter = dict(options or {}), None
    if checkpoint.base:
        from ropecli.live.adapter import merge_adapter, other_base, read_adapter

        adapter = read_adapter(checkpoint.folder)  # before the base, which may take minutes
    try:
        with quiet_transformers():
            if checkpoint.base:
                options["config"] = AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                (checkpoint.base or checkpoint).folder,
                dtype=getattr(torch, dtype),
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **({} if attn == "auto" else {"attn_implementation": attn}),
                **options,
            )
    except Exception as error:  # damaged weights and configs raise many kinds of errors
        raise CheckpointError(f"{checkpoint.name} cannot be loaded: {reason_of_stock(error)}") from error
    model, found = loaded
    if saved is not None and model.config.get_text_config()._attn_implementation != saved.attention:
        raise CheckpointError(
            f"{checkpoint.name}: transformers ignores the attention set in config.json, {saved.attention}."
        )
    _check_weights(checkpoint, found, say)
    if not options.get("device_map"):
        model.to(device)
    if checkpoint.base and adapter:
        if say and (warning := other_base(checkpoint.folder, checkpoint.base)):
            say(warning)
        model = merge_adapter(checkpoint, model, *adapter)
    return model.eval()


def _check_weights(checkpoint: Checkpoint, found: Mapping[str, Any], say: Callable[[str], None] | None) -> None:
    """Check that files and model have the same tensors. found: transformers' loading_info. say: see load_model."""
    if found["mismatched_keys"]:
        name, there, expected = sorted(found["mismatched_keys"])[0]
        raise CheckpointError(
            f"{checkpoint.name}: {name} has shape {tuple(there)}; config.json implies {tuple(expected)}."
        )
    if found["missing_keys"]:
        raise CheckpointError(f"{checkpoint.name}: {sorted(found['missing_keys'])[0]} is missing in the weight files.")
    if unused := sorted(name for name in found["unexpected_keys"] if not _is_mtp(name, checkpoint.config)):
        names = ", ".join(unused[:3]) + (f" and {len(unused) - 3} more" if len(unused) > 3 else "")
        message = f"{checkpoint.name}: {len(unused)} tensors of the weight files are not used by config.json: {names}."
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

    known = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if not any((checkpoint.folder / name).is_file() for name in known):
        raise CheckpointError(
            f"{checkpoint.name}: no tokenizer in {checkpoint.folder}; expected one of {', '.join(known)}."
        )
    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(checkpoint.folder, trust_remote_code=False)
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
