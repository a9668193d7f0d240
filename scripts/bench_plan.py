"""Compares the training memory predicted by `ropecli plan` with real steps on a CPU.

    python scripts/bench_plan.py            # table of predicted, measured, ratio; exit status 1 if off by more than 5%
    python scripts/bench_plan.py --json
    python scripts/bench_plan.py --resident   # also the growth of the resident set

Each configuration runs two full steps (with clipping and AdamW) of a model with random weights in a new process, with
ropecli's loss and optimizer. "measured" is the peak of the bytes held by torch's allocator, from torch.profiler's
memory events, starting before the model is built; it is exactly reproducible. The resident set is not: it also contains
memory that the C library has not returned and oneDNN's workspace. It is measured as growth after a small training that
loads all code. Only tensor memory is compared; the planner's allowance for CUDA (MemoryEstimate.runtime) does not apply
to a CPU. Like the GPU kernels, SDPA's CPU kernel allocates no tokens × tokens scores for causal attention; Gemma 2,
which caps its scores, does not use SDPA and allocates them.
"""

import json
import os
import subprocess
import sys
from typing import Any

_SMALL = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
_DEFAULTS = {"mixed_precision": "none", "gradient_accumulation": 1}
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
"""config.json entries of a distance method."""
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
    from ropecli.training.recipe import Recipe

    return Recipe(data="none is read", **{**_DEFAULTS, **case["recipe"]})


def predict(case: dict[str, Any], gpu: bool = False) -> int:
    """Predicted bytes of tensors in one process."""
    from ropecli.training.memory_plan.estimate import MemoryEstimator

    on_gpu = gpu or "half_base" in case
    estimate = MemoryEstimator(config_of(case)).estimate(recipe_of(case), case["length"], gpu=on_gpu)
    return estimate.total - estimate.runtime


def train(case: dict[str, Any], device: str = "cpu", steps: int = 2) -> None:
    """Full training steps on random tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    import ropecli.attention  # noqa: F401  (registers the methods' attention)
    from ropecli.training.adapters import attach
    from ropecli.training.loss import NextTokenLoss
    from ropecli.training.optimization import make_optimizer

    recipe = recipe_of(case)
    torch.manual_seed(0)
    half = "half_base" in case or (recipe.adapter != "none" and device != "cpu")
    dtype = torch.bfloat16 if half else torch.float32
    attention = {} if recipe.attn == "auto" else {"attn_implementation": recipe.attn}
    model = AutoModelForCausalLM.from_config(config_of(case), dtype=dtype, **attention)
    loss_of = NextTokenLoss(attach(model, recipe)).to(device)
    model.train()
    if recipe.gradient_checkpointing:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    optimizer = make_optimizer(loss_of.named_parameters(), recipe)
    ids = torch.randint(case["vocab"], (recipe.batch_size, case["length"] + 1), device=device)
    packed = recipe.sequences == "packed"  # four documents per sequence
    positions = (torch.arange(case["length"], device=device) % (case["length"] // 4)).expand_as(ids[:, 1:])
    for _ in range(steps):
        for _ in range(recipe.gradient_accumulation):
            with torch.autocast(device, torch.bfloat16, enabled=recipe.mixed_precision == "bf16"):
                loss = loss_of(ids[:, :-1], ids[:, 1:], positions if packed else None, packed)
            (loss / ids.numel()).backward()
            del loss
        torch.nn.utils.clip_grad_norm_([one for one in loss_of.parameters() if one.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()


def allocated(case: dict[str, Any]) -> int:
    """Peak bytes held by torch's CPU allocator while the case trains."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        train(case)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def _only(name: str, way: str) -> None:
    import torch

    from ropecli.live.peak_memory import peak_memory, reset_peak

    torch.set_num_threads(2)
    if way == "allocated":
        sys.stdout.write(f"{allocated(CASES[name])}\n")
        return
    cpu = torch.device("cpu")
    train({**CASES[name], "vocab": 512, "layers": 1, "length": 64})
    reset_peak(cpu)
    before = peak_memory(cpu)
    train(CASES[name])
    sys.stdout.write(f"{peak_memory(cpu) - before}\n")


def _in_new_process(name: str, way: str) -> int:
    # return large tensors to the system immediately, as CUDA returns them to its pool
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    words = [sys.executable, __file__, "--only", name, way]
    run = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    return int(run.stdout.splitlines()[-1])


def main() -> None:
    if "--only" in sys.argv:
        _only(*sys.argv[-2:])
        return
    rows = []
    for name, case in CASES.items():
        row = {"case": name, "predicted": predict(case), "measured": _in_new_process(name, "allocated")}
        row["ratio"] = row["predicted"] / row["measured"]
        if "--resident" in sys.argv:
            row["resident"] = _in_new_process(name, "resident")
        rows.append(row)
        if "--json" not in sys.argv:
            sizes = "".join(f"{row[key] / 2**20:10.1f}" for key in ("predicted", "measured", "resident") if key in row)
            sys.stdout.write(f"{name:34}{sizes} MiB  ratio {row['ratio']:.3f}\n")
            sys.stdout.flush()
    if "--json" in sys.argv:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
    if any(abs(row["ratio"] - 1) > 0.05 for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
