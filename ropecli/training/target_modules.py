"""Finds the modules that an adapter is put beside, in any architecture: projections, embeddings, norms, a tied head."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn

from ropecli.errors import RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def _decoder_modules(model: "PreTrainedModel") -> dict[str, nn.Module]:
    """The text decoder's modules by name. Models of other senses beside it get no gradient from text."""
    from transformers import PreTrainedModel

    embeddings = model.get_input_embeddings()

    def reads_text(module: nn.Module) -> bool:
        return not isinstance(module, PreTrainedModel) or embeddings in set(module.modules())

    decoder = model.get_decoder()
    # in some types that name leads to the head
    ahead = [decoder if isinstance(decoder, PreTrainedModel) else model.base_model]
    inside: set[nn.Module] = set()
    while ahead:
        inside.add(module := ahead.pop())
        ahead += [child for child in module.children() if reads_text(child)]
    return {name: module for name, module in model.named_modules() if module in inside}


def linear_modules(model: "PreTrainedModel") -> dict[str, nn.Module]:
    """The decoder's linear modules by name, never the head: its loss is computed without running it."""
    head = model.get_output_embeddings()
    return {
        name: module for name, module in _decoder_modules(model).items() if module is not head and _is_linear(module)
    }


@torch.no_grad()
def _is_linear(module: nn.Module) -> bool:
    """One matrix and no more: some models subclass Linear to multiply by blocks, which an adapter would not fit."""
    if not isinstance(module, nn.Linear):
        return False
    if type(module).__module__.startswith("bitsandbytes.") or type(module).forward is nn.Linear.forward:
        return True
    probe = torch.ones(1, 1, module.in_features, dtype=module.weight.dtype, device=module.weight.device)
    try:
        found, expected = module(probe), nn.functional.linear(probe, module.weight, module.bias)
        # without weights there is the shape alone to go by
        return found.shape == expected.shape and (found.is_meta or torch.allclose(found, expected, rtol=1e-2))
    except (RuntimeError, TypeError):
        return False


def attention_projections(model: nn.Module, linear: dict[str, nn.Module]) -> list[str]:
    """Those that an attention module holds itself. What stands deeper in it, as an indexer, may have no gradient."""

    def in_attention(name: str) -> bool:
        holder = type(model.get_submodule(name.rpartition(".")[0])).__name__
        return any(word in holder for word in ("Attention", "MLA"))

    return [name for name in linear if in_attention(name)]


def find_targets(linear: dict[str, nn.Module], targets: Iterable[str]) -> list[str]:
    """The modules that `lora_targets` names. Raises RecipeError for names that no module has."""
    found = {target: [name for name in linear if matches_target(name, target)] for target in targets}
    if missing := [target for target, names in found.items() if not names]:
        raise RecipeError(f"lora_targets: no linear module is named {', '.join(missing)}. {list_names(linear)}")
    return [name for name in linear if any(name in names for names in found.values())]


def list_names(linear: dict[str, nn.Module]) -> str:
    """A sentence for error messages: the names that lora_targets may have."""
    return f"There are: {', '.join(sorted({name.rpartition('.')[2] for name in linear}))}."


def embeddings_and_norms(model: "PreTrainedModel") -> list[str]:
    embeddings = model.get_input_embeddings()
    return [name for name, module in _decoder_modules(model).items() if module is embeddings or _is_norm(module)]


def tied_head(model: "PreTrainedModel") -> list[str]:
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embeddings.weight:
        return []
    return [name for name, module in model.named_modules() if module is head]


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and any(True for _ in module.parameters(recurse=False))


def matches_target(name: str, target: str) -> bool:
    """peft's rule for target_modules."""
    return name == target or name.endswith(f".{target}")


def shorten(names: list[str], model: nn.Module, matches: Callable[[str, str], bool]) -> list[str]:
    """The last parts of `names` where peft, by its rule `matches`, finds by them exactly `names`; else `names`."""
    short = sorted({name.rpartition(".")[2] for name in names})
    found = {name for name, _ in model.named_modules() if any(matches(name, part) for part in short)}
    return short if found == set(names) else names
