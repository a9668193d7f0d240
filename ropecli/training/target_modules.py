"""Finds the modules that an adapter trains, in any architecture: projections, embeddings, norms, a tied head."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from ropecli.errors import RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def _decoder_modules(model: "PreTrainedModel") -> dict[str, nn.Module]:
    """The text decoder's modules by name. Vision or audio models next to it get no gradient from text."""
    from transformers import PreTrainedModel

    embeddings = model.get_input_embeddings()

    def reads_text(module: nn.Module) -> bool:
        return not isinstance(module, PreTrainedModel) or embeddings in set(module.modules())

    decoder = model.get_decoder()
    # some models return the head here
    ahead = [decoder if isinstance(decoder, PreTrainedModel) else model.base_model]
    inside: set[nn.Module] = set()
    while ahead:
        inside.add(module := ahead.pop())
        ahead += [child for child in module.children() if reads_text(child)]
    return {name: module for name, module in model.named_modules() if module in inside}


def freeze_other_parts(model: "PreTrainedModel") -> None:
    """Freeze the vision and audio parts of a multimodal model. DDP stops at parameters that never get a gradient."""
    if model.config.get_text_config() is model.config:
        return
    text = [*_decoder_modules(model).values(), model.get_input_embeddings(), model.get_output_embeddings()]
    trained = {id(parameter) for module in text for parameter in module.parameters(recurse=False)}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)


def linear_modules(model: "PreTrainedModel") -> dict[str, nn.Module]:
    """The decoder's linear modules by name, except the head: the loss uses its matrix without running it."""
    head = model.get_output_embeddings()
    return {
        name: module for name, module in _decoder_modules(model).items() if module is not head and _is_linear(module)
    }


@torch.no_grad()
def _is_linear(module: nn.Module) -> bool:
    """Return whether the module is one matrix. LoRA does not fit subclasses that multiply by blocks."""
    if not isinstance(module, nn.Linear):
        return False
    if type(module).__module__.startswith("bitsandbytes.") or type(module).forward is nn.Linear.forward:
        return True
    probe = torch.ones(1, 1, module.in_features, dtype=module.weight.dtype, device=module.weight.device)
    try:
        output, expected = module(probe), nn.functional.linear(probe, module.weight, module.bias)
        # without weights, compare only the shapes
        return output.shape == expected.shape and (output.is_meta or torch.allclose(output, expected, rtol=1e-2))
    except (AttributeError, RuntimeError, TypeError):  # AttributeError: a router returns several tensors
        return False


def attention_projections(model: nn.Module, linear: dict[str, nn.Module]) -> list[str]:
    """Projections directly inside an attention module. Deeper ones, such as an indexer's, may have no gradient."""

    def in_attention(name: str) -> bool:
        holder = type(model.get_submodule(name.rpartition(".")[0])).__name__
        return any(word in holder for word in ("Attention", "MLA"))

    return [name for name in linear if in_attention(name)]


def find_targets(linear: dict[str, nn.Module], targets: Sequence[str]) -> list[str]:
    """The modules that match `lora_targets`. Raises RecipeError for names that match no module."""
    if missing := [target for target in targets if not any(matches_target(name, target) for name in linear)]:
        raise RecipeError(f"lora_targets: no linear module is named {', '.join(missing)}. {list_names(linear)}")
    return [name for name in linear if any(matches_target(name, target) for target in targets)]


def list_names(linear: dict[str, nn.Module]) -> str:
    """Sentence for error messages: the names to choose from."""
    return f"Linear modules: {', '.join(sorted({name.rpartition('.')[2] for name in linear}))}."


def embeddings_and_norms(model: "PreTrainedModel") -> list[str]:
    embeddings = model.get_input_embeddings()
    norms = norm_modules(model)
    return [name for name, module in _decoder_modules(model).items() if module is embeddings or name in norms]


def norm_modules(model: "PreTrainedModel") -> dict[str, nn.Module]:
    """The decoder's norms that have parameters, by name."""
    return {
        name: module
        for name, module in _decoder_modules(model).items()
        if "norm" in type(module).__name__.lower() and list(module.parameters(recurse=False))
    }


def tied_head(model: "PreTrainedModel") -> list[str]:
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embeddings.weight:
        return []
    return [name for name, module in model.named_modules() if module is head]


def matches_target(name: str, target: str) -> bool:
    """Match a name as peft does for target_modules."""
    return name == target or name.endswith(f".{target}")


def shorten(names: list[str], model: nn.Module, matches: Callable[[str, str], bool]) -> list[str]:
    """Return the last parts of `names` if peft finds exactly `names` by them, else `names`. matches: peft's rule."""
    short = sorted({name.rpartition(".")[2] for name in names})
    matching = {name for name, _ in model.named_modules() if any(matches(name, part) for part in short)}
    return short if matching == set(names) else names
