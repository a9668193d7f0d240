"""A small model with the attention of a large one: what is proved of how its heads turn holds for the large one too.

Keeps what the attention depends on: the width, the heads, their norms, the RoPE fields, one layer of each kind. Shrinks
the vocabulary, the feed-forward parts, the experts and the number of layers.
"""

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ropecli.checkpoint.quiet import quiet_transformers
from ropecli.errors import CheckpointError, reason_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_VOCABULARY = 128
_TOKENS = 8
_INTERMEDIATE = 64
_SEED = 0
# a norm whose weights are all 1 commutes with a rotation, and so hides itself
_NOISE = 0.3
_VOCABULARIES = {"vocab_size", "vocab_size_per_layer_input", "padded_vocab_size"}
_AT_MOST = {
    **dict.fromkeys(("ffn_dim", "n_inner", "ffn_hidden_size", "ff_hidden_size", "d_ff"), _INTERMEDIATE),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "experts_per_token"), 2),
    **dict.fromkeys(("moe_top_k", "moe_topk", "moe_k", "top_k_experts"), 2),
    # groups of experts, and the layers before the first that has any
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
}


def make_twin(config: Any) -> "PreTrainedModel":
    """A model of the same architecture and head geometry with random weights, in float32, on the CPU.

    config: as transformers' AutoConfig reads it; it is left as it is. Of a model with other parts than text the text
    part alone, where that is a model by itself. No weight is zero or the same as all its neighbours, so that nothing
    commutes with a rotation by accident. Raises CheckpointError where transformers does not build or run it.
    """
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    text = config.get_text_config()
    config = text if type(text) in AutoModelForCausalLM._model_mapping else config
    for part in (config, text):
        _shrink(part)
    with torch.device("meta"):
        kinds = _kinds(_build(config))
    kept = sorted({kind: index for index, kind in reversed(list(enumerate(kinds)))}.values())
    model = _cut_and_build(config, kept, len(kinds))
    if _kinds(model) != [kinds[index] for index in kept]:  # some count layers: every fourth, the first ten
        model = _cut_and_build(config, list(range(kept[-1] + 1)), len(kinds))
    _perturb(model)
    _try(model)
    return model


def layers_of(model: "PreTrainedModel") -> tuple[nn.Module, str, nn.ModuleList]:
    """(the module that holds the decoder's layers, under which name, the layers). Raises CheckpointError."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return module, name, child
    raise CheckpointError(f"{type(model).__name__} has no list of {count} layers.")


def _shrink(config: Any) -> None:
    """Everything but the number of layers."""
    for key, value in list(vars(config).items()):
        if key.startswith("_"):
            continue
        if key in _VOCABULARIES:
            setattr(config, key, _VOCABULARY)
        elif key.endswith(("_token_id", "_token_index")):
            setattr(config, key, _each(value, lambda _: _VOCABULARY - 1))
        elif "intermediate_size" in key:
            setattr(config, key, _each(value, lambda size: min(size, _INTERMEDIATE)))
        elif (most := _AT_MOST.get(key)) is not None:
            setattr(config, key, _each(value, lambda size, most=most: min(size, most)))
    if hasattr(config, "quantization_config"):
        del config.quantization_config


def _each(value: Any, change: Any) -> Any:
    """change(value) of a whole number, and of those in a list."""
    if isinstance(value, list | tuple):
        return type(value)(_each(one, change) for one in value)
    return change(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _cut_and_build(config: Any, kept: list[int], layers: int) -> "PreTrainedModel":
    """The model with the layers `kept` alone, of `layers`."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for key, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == layers and not key.startswith("_"):
            setattr(text, key, type(value)(value[index] for index in kept))
    shared = getattr(text, "num_kv_shared_layers", None)
    if shared:
        text.num_kv_shared_layers = sum(index >= layers - shared for index in kept)
    text.num_hidden_layers = len(kept)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        return _build(config)


def _build(config: Any) -> "PreTrainedModel":
    from transformers import AutoModelForCausalLM

    try:
        with quiet_transformers():
            return AutoModelForCausalLM.from_config(
                copy.deepcopy(config), trust_remote_code=False, dtype=torch.float32, attn_implementation="eager"
            ).eval()
    except Exception as error:  # config classes raise what they like
        raise CheckpointError(f"transformers does not build a small model of this kind: {reason_of(error)}") from error


def _kinds(model: "PreTrainedModel") -> list[Any]:
    """Layers are of one kind where their modules and parameters are the same, and all that these note of themselves."""
    return [
        (
            tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters()),
            tuple((name, type(module), _notes(module)) for name, module in layer.named_modules()),
        )
        for layer in layers_of(model)[2]
    ]


def _notes(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """The plain values that a module keeps: a window, a layer type, whether it turns; not which layer it is of."""
    return tuple(
        (key, value)
        for key, value in sorted(vars(module).items())
        if isinstance(value, int | float | str | None) and not key.startswith("_") and "idx" not in key
    )


@torch.no_grad()
def _perturb(model: "PreTrainedModel") -> None:
    """Vectors and whatever was filled with one number are made uneven; matrices are random as they were built."""
    numbers = torch.Generator().manual_seed(_SEED)
    for parameter in model.parameters():
        if parameter.ndim < 2 or parameter.min() == parameter.max():
            parameter.add_(_NOISE * torch.randn(parameter.shape, generator=numbers))


@torch.no_grad()
def _try(model: "PreTrainedModel") -> None:
    try:
        with quiet_transformers():
            model(input_ids=torch.arange(_TOKENS)[None], use_cache=False)
    except Exception as error:  # models raise what they like
        raise CheckpointError(f"transformers does not run a small model of this kind: {reason_of(error)}") from error
