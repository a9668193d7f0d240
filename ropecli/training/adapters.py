"""LoRA and QLoRA with peft: trains small matrices next to frozen weights.

LoRA: Hu et al. 2021, arXiv:2106.09685. lora-plus: LoRA on the attention projections, with embeddings and norms trained
in full, which LongLoRA (Chen et al. 2023, arXiv:2309.12307, section 3.3) found necessary for long context; not LoRA+
with its two learning rates. qlora: a 4-bit base (Dettmers et al. 2023, arXiv:2305.14314).
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
    freeze_other_parts,
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
"""peft's default name of an adapter."""


def attach(model: "PreTrainedModel", recipe: Recipe) -> "PreTrainedModel":
    """Freeze the model and inject the recipe's adapter, in place. Returns the model.

    For adapter: none, freeze only vision and audio parts, which text does not train. Trained parameters are float32,
    whatever the dtype of the base. peft's wrapper class is not used, so the model stays a PreTrainedModel. Call this
    before the first forward pass. Raises RecipeError if a name in lora_targets matches no module.
    """
    if recipe.adapter == "none":
        freeze_other_parts(model)
        return model
    from peft import inject_adapter_in_model

    config = _make_lora_config(model, recipe)
    model.requires_grad_(False)
    whole = embeddings_and_norms(model) if recipe.adapter == "lora-plus" else []
    with torch.random.fork_rng(devices=[]):  # same initial values on every process and when resuming
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
        raise RecipeError(f"Found no linear projections in the attention. Set lora_targets. {list_names(linear)}")
    # other readers of adapter_config.json expect an integer
    alpha: Any = int(recipe.lora_alpha) if recipe.lora_alpha == int(recipe.lora_alpha) else recipe.lora_alpha
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=recipe.lora_rank,
        lora_alpha=alpha,
        lora_dropout=recipe.lora_dropout,
        target_modules=shorten(targets, model, matches_target),
    )


def _keep_differentiable(model: nn.Module) -> None:
    """Keep gradients correct through 4-bit weights on CPUs with AVX512.

    bitsandbytes 0.50 repacks these weights in the first forward pass in evaluation mode, and gradients are wrong
    afterwards. This attribute disables the repacking.
    """
    switch = "support_avx512bf16_for_cpu"
    for module in model.modules():
        if getattr(module, switch, False):
            setattr(module, switch, False)


def _train_whole(model: "PreTrainedModel", names: list[str]) -> None:
    """Train embeddings and norms in full, in float32, and cast their outputs to the base's dtype.

    float32 outputs would double the memory of hidden states, and without autocast would meet weights of another dtype.
    """
    embeddings: Any = model.get_input_embeddings()
    dtype, head = embeddings.weight.dtype, tied_head(model)

    def cast_output(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output.to(dtype)

    def cast_input(module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (inputs[0].to(module.weight.dtype), *inputs[1:])

    for name in names:
        module = model.get_submodule(name)
        module.requires_grad_(True)
        if dtype != torch.float32:
            module.register_forward_hook(cast_output)
    for name in head if dtype != torch.float32 else []:
        model.get_submodule(name).register_forward_pre_hook(cast_input)
    # set after injection, only for adapter_config.json: peft would train copies and not update a tied head
    lora_config(model).modules_to_save = shorten([*names, *head], model, str.endswith)


def is_attached(model: nn.Module) -> bool:
    """Return whether the model has an adapter."""
    return hasattr(model, "peft_config")


def lora_config(model: nn.Module) -> Any:
    """The LoraConfig of the attached adapter."""
    attached: Any = model
    return attached.peft_config[ADAPTER]


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) of each trained parameter; a tied parameter is listed once."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def all_names(model: nn.Module) -> list[tuple[nn.Parameter, list[str]]]:
    """Each parameter with all its names; a tied parameter has several."""
    named: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        named.setdefault(parameter, []).append(name)
    return list(named.items())


def quantization(recipe: Recipe) -> dict[str, Any]:
    """Keyword arguments for from_pretrained: for qlora, 4-bit weights in all linear modules except the head.

    NF4 with double quantization (arXiv:2305.14314, section 3).
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
    """Make save_state write only the trained parameters of the model, and load_state read only those.

    Frozen 4-bit weights cannot be loaded back. Engines that write their own shards (FSDP, DeepSpeed) still write
    everything.
    """
    accelerator.register_save_state_pre_hook(_drop_frozen)
    accelerator.register_load_state_pre_hook(_load_trained)


def _drop_frozen(models: list[nn.Module], weights: list[dict[str, torch.Tensor]], folder: str) -> None:
    for model, state in zip(models, weights, strict=False):  # sharded engines pass no weights
        trained = {name for parameter, names in all_names(model) if parameter.requires_grad for name in names}
        for name in state.keys() - trained:
            del state[name]


def _load_trained(models: list[nn.Module], folder: str) -> None:
    """Load the trained parameters, and remove the model from the list so that Accelerate skips the frozen ones."""
    from safetensors.torch import load_file

    if models:
        models.pop().load_state_dict(load_file(Path(folder) / "model.safetensors"), strict=False)


def adapter_tensors(model: "PreTrainedModel", state: Tensors | None = None) -> Tensors:
    """The trained tensors on the CPU, under peft's names.

    state: full tensors under the model's own names, if the model holds shards. A tied tensor is listed under each of
    its names: peft does not detect all ties, and would not update the head.
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
    """Write adapter_model.safetensors and adapter_config.json, as peft reads them. Raises OSError.

    The adapter names `checkpoint`, patched as it was trained, as its base; peft loads the base by that name, with
    the base's own config.json. The caller adds the patched config.json.
    """
    config = copy.copy(lora_config(model))
    config.target_modules = sorted(config.target_modules)  # the order of a set differs between runs
    if checkpoint.commit:
        config.base_model_name_or_path, config.revision = checkpoint.name, checkpoint.commit
    else:
        config.base_model_name_or_path, config.revision = str(checkpoint.folder.resolve()), None
    config.inference_mode = True
    save_file(adapter_tensors(model, state), folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    config.save_pretrained(folder)
