"""LoRA and QLoRA with peft: trains small matrices next to frozen weights.

LoRA: Hu et al. 2021, arXiv:2106.09685. lora-plus: LoRA on the attention projections, with embeddings and norms trained
in full, which LongLoRA (Chen et al. 2023, arXiv:2309.12307, section 3.3) found necessary for long context; not LoRA+
with its two learning rates. qlora: a 4-bit base (Dettmers et al. 2023, arXiv:2305.14314).
"""

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ropecli.checkpoint.files import ADAPTER_WEIGHTS
from ropecli.checkpoint.opening import Checkpoint
from ropecli.errors import RecipeError
from ropecli.live.adapter import PREFIX, Tensors
from ropecli.live.tensors import named_tensors, ties_head
from ropecli.training.recipe_schema import Recipe

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
        _freeze_other_parts(model)
        return model
    from peft import inject_adapter_in_model

    config = _make_lora_config(model, recipe)
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):  # same initial values on every process and when resuming
        torch.manual_seed(recipe.seed)
        inject_adapter_in_model(config, model, ADAPTER)
    model.train(model.training)
    # on CPUs with AVX512, bitsandbytes 0.50 repacks 4-bit weights in the first forward pass in evaluation mode, and
    # gradients are wrong afterwards
    switch: Any = "support_avx512bf16_for_cpu"
    for module in model.modules():
        if getattr(module, switch, False):
            setattr(module, switch, False)
    if recipe.adapter == "lora-plus":
        _train_in_full(model)
    for _, parameter in trainable(model):
        parameter.data = parameter.data.float()
    return model


def _make_lora_config(model: "PreTrainedModel", recipe: Recipe) -> "LoraConfig":
    from peft import LoraConfig

    linear = _linear_modules(model)
    known = f"Linear modules: {', '.join(sorted({name.rpartition('.')[2] for name in linear}))}."
    chosen = [*linear] if recipe.lora_targets == ("all-linear",) else recipe.lora_targets
    missing = [target for target in chosen if not any(_matches(name, target) for name in linear)]
    targets = [name for name in linear if any(_matches(name, target) for target in chosen)]
    targets = targets or _attention_projections(model, linear)
    if missing or not targets:
        unknown = f"is named {', '.join(missing)}" if missing else "is part of the attention"
        raise RecipeError(f"lora_targets: no linear module {unknown}. {known}")
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=recipe.lora_rank,
        lora_alpha=recipe.lora_alpha,
        lora_dropout=recipe.lora_dropout,
        target_modules=targets,  # peft shortens a long list
    )


def _train_in_full(model: "PreTrainedModel") -> None:
    """Train embeddings and norms in full, in float32, and cast their outputs to the base's dtype.

    float32 outputs would double the memory of hidden states, and without autocast would meet weights of another dtype.
    """
    embeddings: Any = model.get_input_embeddings()
    dtype, tied_head = embeddings.weight.dtype, model.get_output_embeddings() if ties_head(model) else None
    head = [name for name, module in model.named_modules() if module is tied_head]
    names = [name for name, module in _decoder_modules(model).items() if module is embeddings or _is_norm(module)]

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
    lora_config(model).modules_to_save = [*names, *head]


def lora_config(model: nn.Module) -> Any:
    """The LoraConfig of the attached adapter."""
    attached: Any = model
    return attached.peft_config[ADAPTER]


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) of each trained parameter; a tied parameter is listed once."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def quantization(recipe: Recipe, device: torch.device) -> dict[str, Any]:
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
    return {"quantization_config": config, "device_map": {"": device}}


def save_only_trained(accelerator: Any) -> None:
    """Make save_state write only the trained parameters of the model, and load_state read only those.

    Frozen 4-bit weights cannot be loaded back. FSDP, which writes its own shards, still writes everything.
    """
    accelerator.register_save_state_pre_hook(_drop_frozen)
    accelerator.register_load_state_pre_hook(_load_trained)


def _drop_frozen(models: list[nn.Module], weights: list[dict[str, torch.Tensor]], folder: str) -> None:
    for model, state in zip(models, weights, strict=False):  # FSDP passes no weights
        trained = {name for names, tensor in named_tensors(model) if tensor.requires_grad for name in names}
        for name in state.keys() - trained:
            del state[name]


def _load_trained(models: list[nn.Module], folder: str) -> None:
    """Load the trained parameters, and remove the model from the list so that Accelerate skips the frozen ones."""
    if models:
        models.pop().load_state_dict(load_file(Path(folder) / "model.safetensors"), strict=False)


def adapter_tensors(model: "PreTrainedModel", state: Tensors | None = None) -> Tensors:
    """The trained tensors on the CPU, under peft's names.

    state: full tensors under the model's own names, if the model holds shards. A tied tensor is listed under each of
    its names: peft does not detect all ties, and would not update the head.
    """
    from peft import get_peft_model_state_dict

    full: Tensors = {}
    for names, tensor in named_tensors(model):
        if tensor.requires_grad:
            value = tensor if state is None else next(state[name] for name in names if name in state)
            full |= {name: value.detach().cpu().clone() for name in names}
    lora = get_peft_model_state_dict(model, full, ADAPTER, save_embedding_layers=False)
    in_full = {name: tensor for name, tensor in full.items() if f".{ADAPTER}." not in name}
    return {PREFIX + name: tensor.contiguous() for name, tensor in {**lora, **in_full}.items()}


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


def _decoder_modules(model: "PreTrainedModel") -> dict[str, nn.Module]:
    """The text decoder's modules by name. Vision or audio models next to it get no gradient from text."""
    from transformers import PreTrainedModel

    decoder, embeddings = model.get_decoder(), model.get_input_embeddings()
    # some models return the head here
    decoder = decoder if isinstance(decoder, PreTrainedModel) else model.base_model
    inside = set(decoder.modules())
    for part in decoder.modules():
        if part is not decoder and isinstance(part, PreTrainedModel) and embeddings not in set(part.modules()):
            inside -= set(part.modules())
    return {name: module for name, module in model.named_modules() if module in inside}


def _freeze_other_parts(model: "PreTrainedModel") -> None:
    """Freeze the vision and audio parts of a multimodal model. DDP stops at parameters that never get a gradient."""
    if model.config.get_text_config() is model.config:
        return
    text = [*_decoder_modules(model).values(), model.get_input_embeddings(), model.get_output_embeddings()]
    trained = {id(parameter) for module in text for parameter in module.parameters(recurse=False)}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)


def _linear_modules(model: "PreTrainedModel") -> dict[str, nn.Module]:
    """The decoder's linear modules by name, except the head: the loss uses its matrix without running it."""
    head = model.get_output_embeddings()
    return {
        name: module for name, module in _decoder_modules(model).items() if module is not head and _is_linear(module)
    }


def _is_linear(module: nn.Module) -> bool:
    """Whether the module is one matrix. LoRA does not fit subclasses that multiply by blocks, nor routers."""
    in_four_bits = type(module).__module__.startswith("bitsandbytes.")
    return isinstance(module, nn.Linear) and (in_four_bits or type(module).forward is nn.Linear.forward)


def _attention_projections(model: nn.Module, linear: dict[str, nn.Module]) -> list[str]:
    """Projections directly inside an attention module. Deeper ones, such as an indexer's, may have no gradient."""
    holders = {name: type(model.get_submodule(name.rpartition(".")[0])).__name__ for name in linear}
    return [name for name, holder in holders.items() if "Attention" in holder or "MLA" in holder]


def _is_norm(module: nn.Module) -> bool:
    """Return whether the module is a norm with parameters."""
    return "norm" in type(module).__name__.lower() and bool(list(module.parameters(recurse=False)))


def _matches(name: str, target: str) -> bool:
    """Match a name as peft does for target_modules."""
    return name == target or name.endswith(f".{target}")
