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
    from peft import LoraConfig
    from transformers import PreTrainedModel

ADAPTER = "default"
"""peft's name of an only adapter."""


def attach(model: "PreTrainedModel", recipe: Recipe) -> "PreTrainedModel":
    """Freeze the model and put the recipe's adapter into it; the same object, unchanged for adapter: none.

    What is trained is float32, whatever the base is. peft's wrapper is not used: the model stays a PreTrainedModel,
    with the decoder and the head where they were. To be called before the first pass through the model. Raises
    RecipeError for lora_targets that no module has.
    """
    if recipe.adapter == "none":
        return model
    from peft import inject_adapter_in_model

    config = _make_lora_config(model, recipe)
    model.requires_grad_(False)
    whole = embeddings_and_norms(model) if recipe.adapter == "lora-plus" else []
    with torch.random.fork_rng(devices=[]):  # the same start on every process, and in a run that is resumed
        torch.manual_seed(recipe.seed)
        inject_adapter_in_model(config, model, ADAPTER)
    model.train(model.training)
    _keep_differentiable(model)
    if whole:
        _train_whole(model, whole)
    for _, parameter in trainable(model):
        parameter.data = parameter.data.float()
    return model


def _make_lora_config(model: "PreTrainedModel", recipe: Recipe) -> "LoraConfig":
    from peft import LoraConfig

    linear = linear_modules(model)
    targets = find_targets(linear, recipe.lora_targets) if recipe.lora_targets else attention_projections(model, linear)
    if not targets:
        raise RecipeError(f"No attention with linear projections was found; name lora_targets. {list_names(linear)}")
    # other readers of the file expect a whole number
    alpha: Any = int(recipe.lora_alpha) if recipe.lora_alpha == int(recipe.lora_alpha) else recipe.lora_alpha
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=recipe.lora_rank,
        lora_alpha=alpha,
        lora_dropout=recipe.lora_dropout,
        target_modules=shorten(targets, model, matches_target),
    )


def _keep_differentiable(model: nn.Module) -> None:
    """bitsandbytes 0.50 repacks 4-bit weights for a CPU's AVX512 at the first pass in evaluation mode; gradients are
    wrong from then on. This is its own switch against that."""
    switch = "support_avx512bf16_for_cpu"
    for module in model.modules():
        if getattr(module, switch, False):
            setattr(module, switch, False)


def _train_whole(model: "PreTrainedModel", names: list[str]) -> None:
    """Train embeddings and norms whole, in float32, and pass their results on in the base's dtype.

    float32 would take twice the memory from layer to layer, and without autocast meet matrices of another dtype.
    """
    embeddings: Any = model.get_input_embeddings()
    dtype, head = embeddings.weight.dtype, tied_head(model)

    def give(module: nn.Module, given: Any, result: torch.Tensor) -> torch.Tensor:
        return result.to(dtype)

    def take(module: Any, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (given[0].to(module.weight.dtype), *given[1:])

    for name in names:
        module = model.get_submodule(name)
        module.requires_grad_(True)
        if dtype != torch.float32:
            module.register_forward_hook(give)
    for name in head if dtype != torch.float32 else []:
        model.get_submodule(name).register_forward_pre_hook(take)
    # set now, for the file alone: peft would train copies, and leave a tied head as it was
    lora_config(model).modules_to_save = shorten([*names, *head], model, str.endswith)


def is_attached(model: nn.Module) -> bool:
    """Whether the model has an adapter."""
    return hasattr(model, "peft_config")


def lora_config(model: nn.Module) -> Any:
    """peft's LoraConfig of an attached adapter."""
    held: Any = model
    return held.peft_config[ADAPTER]


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) of trained parameters; a tied one once."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def all_names(model: nn.Module) -> list[tuple[nn.Parameter, list[str]]]:
    """Each parameter with all its names; a tied one has several."""
    named: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        named.setdefault(parameter, []).append(name)
    return list(named.items())


def quantization(recipe: Recipe) -> dict[str, Any]:
    """Keyword arguments of from_pretrained: for qlora, linear modules in 4 bits but the head; else none.

    4-bit NormalFloat with doubly quantised constants (arXiv:2305.14314, section 3).
    """
    if recipe.adapter != "qlora":
        return {}
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if recipe.mixed_precision == "bf16" else torch.float32,
    )
    return {"quantization_config": config, "device_map": {"": choose_device()}}


def save_only_trained(accelerator: Any) -> None:
    """Have save_state write of the model only what is trained, and load_state read it back beside the rest.

    Frozen 4-bit weights could not be loaded back at all. Engines that write their own shards (FSDP, DeepSpeed) still
    write all of it.
    """
    accelerator.register_save_state_pre_hook(_drop_frozen)
    accelerator.register_load_state_pre_hook(_load_trained)


def _drop_frozen(models: list[nn.Module], weights: list[dict[str, torch.Tensor]], folder: str) -> None:
    for model, state in zip(models, weights, strict=False):  # of engines with shards, none are given
        trained = {name for parameter, names in all_names(model) if parameter.requires_grad for name in names}
        for name in state.keys() - trained:
            del state[name]


def _load_trained(models: list[nn.Module], folder: str) -> None:
    """Takes the model off the list, so that Accelerate does not miss what is frozen."""
    from safetensors.torch import load_file

    if models:
        models.pop().load_state_dict(load_file(Path(folder) / "model.safetensors"), strict=False)


def adapter_tensors(model: "PreTrainedModel", state: Tensors | None = None) -> Tensors:
    """The trained tensors by peft's names, on the CPU.

    state: full tensors by the model's own names, where the model itself holds shards. A tied one is there under
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
    """Write the two files that peft reads: the adapter's tensors and adapter_config.json. Raises OSError.

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
