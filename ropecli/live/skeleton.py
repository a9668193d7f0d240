"""Models without weights, their layers, and small models with a few layers of each kind.

A small model has the attention of a large one, so that proofs about its heads also hold for the large one. It keeps
everything that affects the attention: width, heads, norms, RoPE fields, one layer of each kind. It shrinks the
vocabulary, the feed-forward parts, the experts and the number of layers.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ropecli.errors import CheckpointError
from ropecli.live.rotary import reset_tables, rotary_tables
from ropecli.live.stock_transformers import auto_class_of, quiet_transformers, reason_of_stock

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
CHOSEN_EXPERTS = (
    *("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_top_k", "moe_topk", "moe_k"),
)
"""Names of the number of experts, and of those that a token uses."""
_VOCABULARY = 128
_WIDTH = 64  # of feed-forward parts
_MAX_LAYERS = 4  # models with at most this many layers keep all of them
_SEED = 0
_PLAIN: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
# a norm with all weights equal to 1 commutes with the rotation, so the proof would not detect it
_NOISE = 0.3
_VOCABULARIES = {"vocab_size", "vocab_size_per_layer_input", "padded_vocab_size"}
_FEED_FORWARD = ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner")
_AT_MOST = {
    **dict.fromkeys(EXPERTS, 4),
    **dict.fromkeys((*CHOSEN_EXPERTS, "zero_expert_num", "top_k_experts"), 2),
    # groups of experts, and the number of dense layers before the first with experts
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
}
# vision and audio parts, without which some models cannot be built
_OTHER_LAYERS = dict.fromkeys(("num_hidden_layers", "num_blocks", "encoder_layers", "depth", "num_global_layers"), 2)
# suffixes of fields that list layers by index
_INDICES = ("layer_ids", "layer_indices", "_idxs", "only_layers")


def build_model(config: Any, device: str = "meta", **options: Any) -> "PreTrainedModel":
    """Build the model of a config with random weights, or without on the meta device; never with its own code.

    config: see auto_class_of; it is not changed. options: further arguments of from_config. Raises CheckpointError.
    """
    auto_class = auto_class_of(config)
    try:
        with quiet_transformers(), torch.device(device):
            return auto_class.from_config(copy.deepcopy(config), trust_remote_code=False, **options)
    except Exception as error:  # model classes raise many kinds of errors
        reason = reason_of_stock(error)
        raise CheckpointError(f"transformers cannot build a model of type {config.model_type}: {reason}") from error


def build_without_weights(config: Any) -> "PreTrainedModel":
    """Build the model of a config on the meta device, with its rotary modules on the CPU.

    config: as read by transformers. The rotary modules are recreated from it as from_pretrained does after loading the
    weights. Raises CheckpointError, and PatchError if there is no rotary table.
    """
    model = build_model(config)
    reset_tables(rotary_tables(model), "cpu")
    return model


def decoder_layers(model: "PreTrainedModel") -> torch.nn.ModuleList:
    """The decoder's layers."""
    # some model types return their LM head from get_decoder
    lists: list[torch.nn.ModuleList] = []
    for module in (model.get_decoder(), model):
        lists = lists or [part for part in module.modules() if isinstance(part, torch.nn.ModuleList)]
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    # if the count does not match (shared layers), the longest module list is the layers
    return next((part for part in lists if len(part) == count), None) or max(lists, key=len)


def make_small_model(config: Any) -> "tuple[PreTrainedModel, list[int]]":
    """Build a model of the same architecture and head geometry with random weights, in float32, on the CPU.

    config: as read by transformers' AutoConfig; it is not changed. Multimodal models are reduced to their text model if
    it can be built separately. No weight is constant, so that nothing commutes with a rotation by accident. Returns
    also the place there of each layer of the large model. Raises CheckpointError if transformers cannot build it.
    """
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    text = config.get_text_config()
    config = text if type(text) in AutoModelForCausalLM._model_mapping else config
    _shrink(config)
    small, places = few_layers(config, _MAX_LAYERS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model = build_model(small, "cpu", **_PLAIN).eval()
    _perturb(model)
    return model, places


def few_layers(config: Any, most: int = 0) -> tuple[Any, list[int]]:
    """A config with a layer of each kind, and for each layer of the model the place of its kind there.

    A model with at most `most` layers keeps all of them. Raises CheckpointError.
    """
    kinds = _kinds(build_model(config, **_PLAIN))
    kept = [at for at, kind in enumerate(kinds) if len(kinds) <= most or kind not in kinds[:at]]
    few = _cut(config, kept, len(kinds))
    if _kinds(build_model(few, **_PLAIN)) != [kinds[at] for at in kept]:
        # some models choose layer kinds by index: every fourth, the first ten
        kept = list(range(kept[-1] + 1))
        few = _cut(config, kept, len(kinds))
    last = {kinds[at]: place for place, at in enumerate(kept)}
    return few, [kept.index(at) if at in kept else last[kind] for at, kind in enumerate(kinds)]


def _shrink(config: Any) -> None:
    """Shrink everything except the number of text layers."""
    text = config.get_text_config()
    for key in config.sub_configs:
        if (part := getattr(config, key, None)) is not None:
            _shrink_fields(part, _AT_MOST if part is text else {**_AT_MOST, **_OTHER_LAYERS})
    _shrink_fields(config, _AT_MOST)
    if hasattr(config, "quantization_config"):
        del config.quantization_config


def _shrink_fields(config: Any, limits: dict[str, int]) -> None:
    for key, value in list(vars(config).items()):
        if key in _VOCABULARIES:
            setattr(config, key, _VOCABULARY)
        elif key.endswith(("_token_id", "_token_index")):
            setattr(config, key, _each(value, lambda _: _VOCABULARY - 1))
        elif any(part in key for part in _FEED_FORWARD):
            setattr(config, key, _each(value, partial(min, _WIDTH)))
    for key, limit in limits.items():  # under any attribute name
        if (value := getattr(config, key, None)) is not None:
            setattr(config, key, _each(value, partial(min, limit)))


def _each(value: Any, change: Callable[[int], int]) -> Any:
    """Apply `change` to an integer, or to the integers in a list."""
    if isinstance(value, list | tuple):
        return type(value)(_each(item, change) for item in value)
    return change(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _cut(config: Any, kept: list[int], layers: int) -> Any:
    """A copy with only the layers `kept` out of `layers`, per-layer lists included. Raises CheckpointError."""
    config = copy.deepcopy(config)
    if len(kept) == layers:
        return config
    text = config.get_text_config()
    fields = {key: value for key, value in vars(text).items() if not key.startswith("_")}
    counts = [key for key, value in fields.items() if "layer" in key and type(value) is int and value == layers]
    if not counts:
        raise CheckpointError(f"No field of {type(text).__name__} holds the number of layers, {layers}.")
    for key, value in fields.items():
        if key in counts:
            setattr(text, key, len(kept))
        elif isinstance(value, list | tuple) and key.endswith(_INDICES):
            setattr(text, key, type(value)(kept.index(index) for index in value if index in kept))
        elif isinstance(value, list | tuple) and len(value) == layers:
            setattr(text, key, type(value)(value[index] for index in kept))
    if shared := fields.get("num_kv_shared_layers"):
        text.num_kv_shared_layers = sum(index >= layers - shared for index in kept)
    if dense := fields.get("first_k_dense_replace"):
        text.first_k_dense_replace = sum(index < dense for index in kept)
    return config


def _kinds(model: "PreTrainedModel") -> list[Any]:
    """The kind of each layer: its modules, their attributes, and the shapes of its parameters."""
    return [
        (
            tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters()),
            tuple((name, type(module), _attributes(module)) for name, module in layer.named_modules()),
        )
        for layer in decoder_layers(model)
    ]


def _attributes(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """Attributes of a module that distinguish kinds of layers, such as its layer type or whether it rotates (0 or 1).

    Only the type of other numbers is kept, because some, such as the layer's index, differ in every layer.
    """
    return tuple(
        (key, type(value) if isinstance(value, int | float) and value not in (0, 1) else value)
        for key, value in sorted(vars(module).items())
        if isinstance(value, int | float | str | None) and not key.startswith("_") and key != "layer_idx"
    )


@torch.no_grad()
def _perturb(model: "PreTrainedModel") -> None:
    """Add noise to vectors and constant parameters. Matrices are random already."""
    numbers = torch.Generator().manual_seed(_SEED)
    for parameter in model.parameters():
        if parameter.ndim < 2 or parameter.min() == parameter.max():
            parameter.add_(_NOISE * torch.randn(parameter.shape, generator=numbers))
