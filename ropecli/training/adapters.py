"""LoRA and QLoRA through peft: small matrices beside frozen weights, trained in place of all parameters.

LoRA: Hu et al. 2021, arXiv:2106.09685. lora-plus: LoRA on the attention's projections, and embeddings and norms
trained whole, as LongLoRA (Chen et al. 2023, arXiv:2309.12307, section 3.3) found necessary for long context; not the
LoRA+ of two learning rates. qlora: a base in 4 bits (Dettmers et al. 2023, arXiv:2305.14314).
"""

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import nn

from ropecli.checkpoint.files import ADAPTER_WEIGHTS
from ropecli.checkpoint.opening import Checkpoint
from ropecli.errors import RecipeError
from ropecli.live.adapter import PREFIX, Tensors
from ropecli.live.loading import choose_device
from ropecli.training.optimization import load_bitsandbytes
from ropecli.training.recipe import Recipe
from ropecli.training.target_modules import (
    attention_projections,
    embeddings_and_norms,
    find_targets,
    linear_modules,
    list_names,
    matches_target,
    shorten,
    tied_head,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER = "default"
"""peft's name of an only adapter."""


def attach(model: "PreTrainedModel", recipe: Recipe) -> "PreTrainedModel":
    """Freezes the model and puts the recipe's adapter into it; the same object, unchanged for adapter: none.

    What is trained is float32, whatever the base is. peft's wrapper is not used: the model stays a PreTrainedModel,
    with the decoder and the head where they were. To be called before the first pass through the model. Raises
    RecipeError for lora_targets that are not there.
    """
    if recipe.adapter == "none":
        return model
    from peft import LoraConfig, inject_adapter_in_model

    linear = linear_modules(model)
    targets = find_targets(linear, recipe.lora_targets) if recipe.lora_targets else attention_projections(model, linear)
    if not targets:
        raise RecipeError(f"No attention with linear projections was found; name lora_targets. {list_names(linear)}")
    # other readers of the file expect a whole number
    alpha: Any = int(recipe.lora_alpha) if recipe.lora_alpha == int(recipe.lora_alpha) else recipe.lora_alpha
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=recipe.lora_rank,
        lora_alpha=alpha,
        lora_dropout=recipe.lora_dropout,
        target_modules=shorten(targets, model, matches_target),
    )
    model.requires_grad_(False)
    beside = embeddings_and_norms(model) if recipe.adapter == "lora-plus" else []
    with torch.random.fork_rng(devices=[]):  # the same start on every process, and in a run that is resumed
        torch.manual_seed(recipe.seed)
        inject_adapter_in_model(config, model, ADAPTER)
    model.train(model.training)
    _keep_differentiable(model)
    embeddings: Any = model.get_input_embeddings()
    dtype = embeddings.weight.dtype
    for name in beside:
        model.get_submodule(name).requires_grad_(True)
    for _, parameter in trainable(model):
        parameter.data = parameter.data.float()
    if beside and dtype != torch.float32:
        _keep_dtype(model, beside, dtype)
    if beside:  # set now, for the file alone: peft would train copies, of which a tied head knows nothing
        lora_config(model).modules_to_save = shorten([*beside, *tied_head(model)], model, str.endswith)
    return model


def _keep_differentiable(model: nn.Module) -> None:
    """bitsandbytes 0.50 repacks 4-bit weights for a CPU's AVX512 at the first pass in evaluation mode, and what goes
    through them from then on has no gradient, in training neither. This is its own switch against that."""
    switch = "support_avx512bf16_for_cpu"
    for module in model.modules():
        if getattr(module, switch, False):
            weight: Any = module.weight
            assert not getattr(weight.quant_state, "packing_format_for_cpu", False), "attach before any pass"
            setattr(module, switch, False)


def _keep_dtype(model: "PreTrainedModel", whole: list[str], dtype: torch.dtype) -> None:
    """What float32 embeddings and norms give goes on in the base's dtype: in twice its bytes it would take twice the
    memory from layer to layer, and without autocast meet matrices of another dtype."""

    def give(module: nn.Module, given: Any, result: torch.Tensor) -> torch.Tensor:
        return result.to(dtype)

    def take(module: Any, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (given[0].to(module.weight.dtype), *given[1:])

    for name in whole:
        model.get_submodule(name).register_forward_hook(give)
    for name in tied_head(model):
        model.get_submodule(name).register_forward_pre_hook(take)


def lora_config(model: nn.Module) -> Any:
    """peft's LoraConfig of an attached adapter."""
    held: Any = model
    return held.peft_config[ADAPTER]


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) of what is trained; a tied one once."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def all_names(model: nn.Module) -> list[tuple[nn.Parameter, list[str]]]:
    """Each parameter with all its names, of which a tied one has several."""
    named: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        named.setdefault(parameter, []).append(name)
    return list(named.items())


def quantization(recipe: Recipe) -> dict[str, Any]:
    """Keyword arguments of from_pretrained: for qlora, linear modules in 4 bits but the head; else none.

    4-bit NormalFloat with doubly quantised constants (arXiv:2305.14314, section 3). Raises RecipeError where
    bitsandbytes is missing.
    """
    if recipe.adapter != "qlora":
        return {}
    load_bitsandbytes("adapter: qlora")
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if recipe.mixed_precision == "bf16" else torch.float32,
    )
    return {"quantization_config": config, "device_map": {"": choose_device()}}


def summary(model: "PreTrainedModel") -> str:
    trained, total = model.num_parameters(only_trainable=True), model.num_parameters()
    return f"trains {trained:,} of {total:,} parameters ({trained / total:.2%})"


def save_only_trained(accelerator: Any) -> None:
    """From now on save_state writes of the model what is trained, and load_state reads it back beside the rest.

    Frozen 4-bit weights could not be loaded back at all. Engines that write their shards themselves (FSDP, DeepSpeed)
    go on writing all of it.
    """
    accelerator.register_save_state_pre_hook(_drop_frozen)
    accelerator.register_load_state_pre_hook(_load_trained)


def _drop_frozen(models: list[nn.Module], weights: list[dict[str, torch.Tensor]], folder: str) -> None:
    for model, state in zip(models, weights, strict=False):  # of engines with shards, none are given
        trained = {name for names in _names_of_trained(model) for name in names}
        for name in [name for name in state if name not in trained]:
            del state[name]


def _load_trained(models: list[nn.Module], folder: str) -> None:
    """Takes the model off the list, so that Accelerate does not miss what is frozen. Raises RuntimeError."""
    from safetensors.torch import load_file

    if len(models) != 1:
        return
    model = models.pop()
    state = load_file(Path(folder) / "model.safetensors")
    if missing := [names for names in _names_of_trained(model) if not state.keys() & names]:
        raise RuntimeError(f"model.safetensors lacks {missing[0][0]}")
    if unknown := model.load_state_dict(state, strict=False).unexpected_keys:
        raise RuntimeError(f"the model has no {unknown[0]}")


def _names_of_trained(model: nn.Module) -> list[list[str]]:
    return [names for parameter, names in all_names(model) if parameter.requires_grad]


def adapter_tensors(model: "PreTrainedModel", state: Tensors | None = None) -> Tensors:
    """What was trained, by peft's names, on the CPU.

    state: full tensors by the model's own names, where the model itself holds shards. A tied one stands there under
    each of its names: peft does not know of all ties, and would leave the head as it was.
    """
    from peft import get_peft_model_state_dict

    full: Tensors = {}
    for parameter, names in all_names(model):
        if parameter.requires_grad:
            value = parameter if state is None else next(state[name] for name in names if name in state)
            full |= {name: value.detach().cpu().clone() for name in names}
    lora = get_peft_model_state_dict(model, full, ADAPTER, save_embedding_layers=False)
    whole = {name: tensor for name, tensor in full.items() if f".{ADAPTER}." not in name}
    return {PREFIX + name: tensor.contiguous() for name, tensor in {**lora, **whole}.items()}


def save_adapter(checkpoint: Checkpoint, model: "PreTrainedModel", folder: Path, state: Tensors | None = None) -> None:
    """Writes the two files that peft reads: the adapter's tensors and adapter_config.json. Raises OSError.

    The folder also gets the patched config.json. The adapter names `checkpoint`, patched as it was trained, as its
    base: peft loads the base by that name, with the base's own config.json.
    """
    config = copy.copy(lora_config(model))
    config.target_modules = sorted(config.target_modules)  # a set's order differs from run to run
    if checkpoint.commit:
        config.base_model_name_or_path, config.revision = checkpoint.name, checkpoint.commit
    else:
        config.base_model_name_or_path, config.revision = str(checkpoint.folder.resolve()), None
    config.inference_mode = True
    save_file(adapter_tensors(model, state), folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    config.save_pretrained(folder)
