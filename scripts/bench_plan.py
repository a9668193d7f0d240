"""Compares the memory that `ropecli plan` predicts for a training step with what real steps take on a CPU.

    python scripts/bench_plan.py            # a table of predicted, measured and their ratio; exit 1 beyond 5%
    python scripts/bench_plan.py --json

Every configuration runs in a process of its own: two whole steps (clipping and AdamW's update with them) through our
own loss and optimizer, of a model with random weights. Measured is the largest sum of bytes that torch's allocator has
given out, each allocation and release read off torch.profiler's memory events, from before the model is built. It
repeats to the byte. Only tensor memory is compared: the allowance for CUDA itself (MemoryEstimate.runtime) is left out.
Like the GPU kernels, SDPA's CPU kernel stores no tokens × tokens scores for causal attention. Gemma 2 caps its scores,
so it runs without SDPA and stores them.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

_SMALL = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
_PLAIN = {"mixed_precision": "none", "gradient_accumulation": 1}
REROPE = {
    "attn_implementation": "ropecli:rerope",
    "ropecli_remapping": {
        "method": "rerope",
        "params": {"window": 256},
        "pretrained": 512,
        "target": 8192,
        "rotary_start": 0,
        "neighbours": False,
    },
}
"""What config.json holds of a relative-position method."""
CASES: dict[str, dict[str, Any]] = {
    "llama, 4096 tokens": {"type": "llama", "vocab": 2048, "layers": 6, "length": 4096, "recipe": {}},
    "llama, 2048, no checkpointing": {
        "type": "llama", "vocab": 8192, "layers": 4, "length": 2048, "recipe": {"gradient_checkpointing": False},
    },
    "llama, bf16": {"type": "llama", "vocab": 8192, "layers": 6, "length": 2048, "recipe": {"mixed_precision": "bf16"}},
    "llama, bf16, no checkpointing": {
        "type": "llama", "vocab": 2048, "layers": 4, "length": 1024,
        "recipe": {"mixed_precision": "bf16", "gradient_checkpointing": False},
    },
    "llama, 131072 words": {"type": "llama", "vocab": 131072, "layers": 2, "length": 4096, "recipe": {}},
    "llama, batch 4, accumulation 2": {
        "type": "llama", "vocab": 16384, "layers": 3, "length": 512,
        "recipe": {"batch_size": 4, "gradient_accumulation": 2},
    },
    "llama, LoRA": {"type": "llama", "vocab": 8192, "layers": 4, "length": 2048, "recipe": {"adapter": "lora"}},
    "llama, LoRA, bf16 base": {
        "type": "llama", "vocab": 16384, "layers": 4, "length": 1024, "half_base": True,
        "recipe": {"adapter": "lora", "mixed_precision": "bf16"},
    },
    "qwen2, tied, 65536 words": {
        "type": "qwen2", "vocab": 65536, "layers": 2, "length": 1024, "more": {"tie_word_embeddings": True},
        "recipe": {"gradient_accumulation": 2},
    },
    "gemma2, capped logits": {"type": "gemma2", "vocab": 32768, "layers": 2, "length": 1024, "recipe": {}},
    "llama, eager": {"type": "llama", "vocab": 512, "layers": 2, "length": 1024, "recipe": {"attn": "eager"}},
    "llama, packed": {
        "type": "llama", "vocab": 512, "layers": 2, "length": 2048, "recipe": {"sequences": "packed"},
    },
    "phi3, bf16": {
        "type": "phi3", "vocab": 16384, "layers": 4, "length": 2048, "recipe": {"mixed_precision": "bf16"},
    },
    "qwen3_moe": {
        "type": "qwen3_moe", "vocab": 4096, "layers": 2, "length": 1024, "recipe": {},
        "more": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 352},
    },
    "llama, rerope": {"type": "llama", "vocab": 2048, "layers": 6, "length": 4096, "recipe": {}, "more": REROPE},
}  # fmt: skip


def config_of(case: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    settings = {**_SMALL, "max_position_embeddings": 8192, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    settings |= {"vocab_size": case["vocab"], "num_hidden_layers": case["layers"], **case.get("more", {})}
    return CONFIG_MAPPING[case["type"]](**settings)


def recipe_of(case: dict[str, Any]) -> Any:
    from ropecli.training.settings import Recipe

    return Recipe(data="none is read", **{**_PLAIN, **case["recipe"]})


def predict(case: dict[str, Any], gpu: bool = False) -> int:
    """Bytes of tensors on one process."""
    from ropecli.training.memory_plan.estimate import MemoryEstimator

    on_gpu = gpu or "half_base" in case
    estimate = MemoryEstimator(config_of(case)).estimate(recipe_of(case), case["length"], gpu=on_gpu)
    return estimate.total - estimate.runtime


def train(
    case: dict[str, Any], device: str = "cpu", steps: int = 2, on_step: Callable[[], None] = lambda: None
) -> None:
    """Whole steps as the loop makes them, on random tokens. on_step: called before the first and after each."""
    import torch
    from transformers import AutoModelForCausalLM

    import ropecli.attention  # noqa: F401  (registers the methods' attention)
    from ropecli.training.adapters import attach
    from ropecli.training.finetuning import make_optimizer
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
    optimizer = make_optimizer(loss_of.named_parameters(), recipe)
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
    """Bytes at the peak of what torch's allocator for the CPU gave out while the case was trained."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        train(case)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def _in_new_process(name: str) -> int:
    run = subprocess.run([sys.executable, __file__, "--only", name], capture_output=True, text=True, check=True)
    return int(run.stdout.splitlines()[-1])


def main() -> None:
    if "--only" in sys.argv:
        sys.stdout.write(f"{allocated(CASES[sys.argv[-1]])}\n")
        return
    rows = []
    for name, case in CASES.items():
        row = {"case": name, "predicted": predict(case), "measured": _in_new_process(name)}
        row["ratio"] = row["predicted"] / row["measured"]
        rows.append(row)
        if "--json" not in sys.argv:
            sizes = "".join(f"{row[key] / 2**20:10.1f}" for key in ("predicted", "measured"))
            sys.stdout.write(f"{name:34}{sizes} MiB  ratio {row['ratio']:.3f}\n")
            sys.stdout.flush()
    if "--json" in sys.argv:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
    if any(abs(row["ratio"] - 1) > 0.05 for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
