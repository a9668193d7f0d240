"""Attention of the distance methods against SDPA and flash attention: prefill and decoding."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from peak_memory import peak_memory, reset_peak
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gpu_parts.measuring import LLAMA_8B, Part
from ropecli.attention.block_attention import BlockAttention, Rotation
from ropecli.rope import Branch, Remapping
from ropecli.scaling.registry import scaling_methods

GOAL = 1.5
STANDARD = Remapping((Branch(np.zeros_like, lambda n: n + 1),))
"""Standard attention by our own kernels."""
Tensor = torch.Tensor


def run(part: Part) -> None:
    lengths = (256, 512) if part.toy else (8192, 32_768, 131_072)
    heads, kv_heads, width = (4, 2, 16) if part.toy else (32, 8, LLAMA_8B["head_dim"])
    rotation = Rotation(500_000.0 ** -(np.arange(width // 2) / (width // 2)))
    for decoding in (False, True):
        for length in lengths:
            queries = 1 if decoding else length
            torch.manual_seed(0)
            tensors = [
                torch.randn(1, count, tokens, width, device=part.device, dtype=torch.bfloat16)
                for count, tokens in ((heads, queries), (kv_heads, length), (kv_heads, length))
            ]
            baseline: dict[str, Any] = {}
            for name, attend in ways(rotation, tensors, lengths[0] // 2, lengths[-1]).items():
                labels = {"phase": "decoding" if decoding else "prefill", "tokens": length, "attention": name}

                def work(attend: Callable[[], Any] = attend, baseline: dict[str, Any] = baseline) -> dict[str, Any]:
                    return cost(part, attend, baseline)

                found = part.measure("one layer", labels, work, needs=5)
                baseline = baseline or found


def ways(rotation: Rotation, tensors: list[Tensor], pretrained: int, target: int) -> dict[str, Callable[[], Any]]:
    """Calls by name; SDPA first."""
    query, key, value = tensors
    decoding = query.shape[2] < key.shape[2]

    def sdpa() -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=not decoding, enable_gqa=True)

    def flash() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return sdpa()

    def by_kernel(remapping: Remapping) -> Callable[[], Tensor]:
        kernel = BlockAttention(remapping, rotation)
        first = key.shape[2] - query.shape[2]
        return lambda: kernel(query, key, value, first_query=first, first_key=0, scaling=query.shape[-1] ** -0.5)

    methods = {name: method for name, method in scaling_methods().items() if method.remaps and method.uses_factor}
    return {
        "SDPA": sdpa,
        "SDPA, flash only": flash,
        "standard, our kernels": by_kernel(STANDARD),
        **{name: by_kernel(method.function(pretrained, target)) for name, method in methods.items()},
    }


@torch.inference_mode()
def cost(part: Part, attend: Callable[[], Any], baseline: dict[str, Any]) -> dict[str, Any]:
    attend()  # compile
    part.wait()
    reset_peak(part.device)
    first = part.seconds_of(attend)
    seconds = min(first, part.seconds_of(attend, rounds=20 if first < 0.05 else 3))
    ratio = seconds / baseline["milliseconds"] * 1000 if "milliseconds" in baseline else 1.0
    return {
        "milliseconds": seconds * 1000,
        "times_sdpa": ratio,
        f"at most {GOAL}": "yes" if ratio <= GOAL else "no",
        "peak_bytes": peak_memory(part.device),
    }
