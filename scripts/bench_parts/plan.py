"""The memory that `ropecli plan` predicts for a training step, against what real steps take on a CPU."""

from collections.abc import Callable
from typing import Any

from bench import Rows, in_new_process

_SMALL = {
    "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
_PLAIN = {"mixed_precision": "none", "gradient_accumulation": 1}
REROPE = {
    "attn_implementation": "ropecli:rerope",
    "ropecli_remapping": {
        "method": "rerope", "params": {"window": 256}, "pretrained": 512, "target": 8192, "rotary_start": 0,
        "neighbours": False,
    },
}  # fmt: skip
"""What config.json holds of a relative-position method."""


def _case(
    model_type: str, vocab: int, layers: int, length: int, more: dict | None = None, **recipe: Any
) -> dict[str, Any]:
    """more: keys of config.json."""
    sizes = {"vocab": vocab, "layers": layers, "length": length}
    return {"type": model_type, **sizes, "more": more or {}, "recipe": recipe}


_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 352}
CASES: dict[str, dict[str, Any]] = {
    "llama, 4096 tokens": _case("llama", 2048, 6, 4096),
    "llama, 2048, no checkpointing": _case("llama", 8192, 4, 2048, gradient_checkpointing=False),
    "llama, bf16": _case("llama", 8192, 6, 2048, mixed_precision="bf16"),
    "llama, bf16, no checkpointing": _case(
        "llama", 2048, 4, 1024, mixed_precision="bf16", gradient_checkpointing=False
    ),
    "llama, 131072 words": _case("llama", 131_072, 2, 4096),
    "llama, batch 4, accumulation 2": _case("llama", 16_384, 3, 512, batch_size=4, gradient_accumulation=2),
    "llama, LoRA": _case("llama", 8192, 4, 2048, adapter="lora"),
    "llama, LoRA, bf16 base": {
        **_case("llama", 16_384, 4, 1024, adapter="lora", mixed_precision="bf16"), "half_base": True,
    },
    "qwen2, tied, 65536 words": _case("qwen2", 65_536, 2, 1024, {"tie_word_embeddings": True}, gradient_accumulation=2),
    "gemma2, capped logits": _case("gemma2", 32_768, 2, 1024),
    "llama, eager": _case("llama", 512, 2, 1024, attn="eager"),
    "llama, packed": _case("llama", 512, 2, 2048, sequences="packed"),
    "phi3, bf16": _case("phi3", 16_384, 4, 2048, mixed_precision="bf16"),
    "qwen3_moe": _case("qwen3_moe", 4096, 2, 1024, _EXPERTS),
    "llama, rerope": _case("llama", 2048, 6, 4096, REROPE),
}  # fmt: skip


def config_of(case: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    settings = {**_SMALL, "max_position_embeddings": 8192, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    settings |= {"vocab_size": case["vocab"], "num_hidden_layers": case["layers"], **case.get("more", {})}
    return CONFIG_MAPPING[case["type"]](**settings)


def recipe_of(case: dict[str, Any]) -> Any:
    from ropecli.training.recipe_schema import Recipe

    return Recipe(data="none is read", **{**_PLAIN, **case["recipe"]})


def predict(case: dict[str, Any], gpu: bool = False) -> int:
    """Bytes of tensors on one process."""
    from ropecli.training.memory_plan.estimate import MemoryEstimator

    on_gpu = gpu or "half_base" in case
    estimate = MemoryEstimator(config_of(case), gpu=on_gpu).estimate(recipe_of(case), case["length"])
    return estimate.total - estimate.runtime


def train(
    case: dict[str, Any], device: str = "cpu", steps: int = 2, on_step: Callable[[], None] = lambda: None
) -> None:
    """Whole steps as the loop makes them, on random tokens. on_step: called before the first and after each."""
    import torch
    from transformers import AutoModelForCausalLM

    import ropecli.attention  # noqa: F401  (registers the methods' attention)
    from ropecli.training.adapters import attach
    from ropecli.training.loop import make_optimizer
    from ropecli.training.loss import NextTokenLoss

    recipe = recipe_of(case)
    torch.manual_seed(0)
    half = "half_base" in case or (recipe.adapter != "none" and device != "cpu")
    dtype = torch.bfloat16 if half else torch.float32
    attention = {} if recipe.attn == "auto" else {"attn_implementation": recipe.attn}
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config_of(case), dtype=dtype, **attention)
    loss_of = NextTokenLoss(attach(model, recipe), offload=recipe.offload_activations).to(device)
    model.train()
    if recipe.gradient_checkpointing:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    optimizer = make_optimizer(loss_of, recipe)
    ids = torch.randint(case["vocab"], (recipe.batch_size, case["length"] + 1), device=device)
    packed = recipe.sequences == "packed"  # documents of a quarter
    positions = (torch.arange(case["length"], device=device) % (case["length"] // 4)).expand_as(ids[:, 1:])
    counts = ids[:, 1:] + 1 if recipe.loss_weighting == "documents" else None
    on_step()
    for _ in range(steps):
        for _ in range(recipe.gradient_accumulation):
            with torch.autocast(device, torch.bfloat16, enabled=recipe.mixed_precision == "bf16"):
                loss = loss_of(ids[:, :-1], ids[:, 1:], positions if packed else None, packed, counts)
            (loss / ids.numel()).backward()
            del loss
        torch.nn.utils.clip_grad_norm_([one for one in loss_of.parameters() if one.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        on_step()


def allocated(case: dict[str, Any]) -> int:
    """Bytes at the peak of what torch's allocator for the CPU gave out while the case was trained, by its profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        train(case)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def run(only: str = "") -> Rows:
    """Compare the memory that `ropecli plan` predicts for training steps with what torch allocates for them on a CPU.

    Every configuration (--only: those whose name contains the word) runs in a process of its own: two whole steps, with
    clipping and AdamW's update, through our own loss and optimizer, of a model with random weights. The measured peak
    repeats to the byte. The allowance for CUDA itself (MemoryEstimate.runtime) is left out. As on GPUs,
    SDPA stores no tokens × tokens scores for causal attention; Gemma 2 caps its scores and runs without SDPA.
    """
    for name, case in CASES.items():
        if only in name:
            predicted, measured = predict(case), in_new_process(allocated, case)
            yield "memory of a training step", {
                "": name, "predicted, MiB": predicted / 2**20, "measured, MiB": measured / 2**20,
                "ratio": f"{predicted / measured:.3f}",
            }  # fmt: skip
