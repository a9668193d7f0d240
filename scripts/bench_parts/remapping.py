"""Attention of the distance methods, against SDPA."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from bench import Rows, best_times, in_new_process, memory_meter
from torch.nn.functional import scaled_dot_product_attention

from ropecli.attention import attention_function
from ropecli.attention.block_attention import BlockAttention, Rotation
from ropecli.attention.patching import live_patch
from ropecli.rope import Branch, Remapping, RopeGeometry
from ropecli.scaling.registry import scaling_methods
from ropecli.scaling.scale import scale
from ropecli.scaling.spec import make_spec

HEADS, HEAD_DIM = 8, 64
PRETRAINED, TARGET = 2048, 8192
SDPA, UNMAPPED, AGAIN = "SDPA", "standard, in blocks", ", rotated again"
IDENTITY = Remapping((Branch(np.zeros_like, lambda n: n + 1),))
TRAINED_HEADS = 2
Step = Callable[[int], torch.Tensor]
"""Takes the number of the round."""


def make_attention(name: str, target: int) -> BlockAttention:
    remapping = IDENTITY if name == UNMAPPED else scaling_methods()[name].function(PRETRAINED, target)
    return BlockAttention(remapping, Rotation(10_000.0 ** -(np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))))


def make_prefill(name: str, tokens: int, kv_heads: int, training: bool = False) -> Step:
    torch.manual_seed(0)
    shapes = [(1, heads, tokens, HEAD_DIM) for heads in (TRAINED_HEADS if training else HEADS, kv_heads, kv_heads)]
    query, key, value = (torch.randn(shape, requires_grad=training) for shape in shapes)
    if name == SDPA:
        return lambda _: scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    kernel = make_attention(name, TARGET)

    def attend(_: int) -> torch.Tensor:
        result = kernel(query, key, value, first_query=0, first_key=0, scaling=HEAD_DIM**-0.5)
        if training:
            result.sum().backward()
        return result

    return attend


def memory(name: str, tokens: int, kv_heads: int, training: bool = False) -> float:
    """Peak memory of a call above its inputs, including its result, MiB."""
    with torch.inference_mode(not training):
        make_prefill(name, 256, kv_heads, training)(0)  # warm up: threads, code
        step = make_prefill(name, tokens, kv_heads, training)
        meter = memory_meter()
        step(0)
        return meter()


def decoding_steps(names: Sequence[str], cached: int, kv_heads: int) -> dict[str, Step]:
    """A forward pass of one token in a model of one layer whose KV cache holds as many keys, one more in each round."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    reads_cache, width = attention_function._reads_cache, HEADS * HEAD_DIM
    geometry = RopeGeometry(HEAD_DIM, HEAD_DIM, 10_000.0, PRETRAINED)

    def make_step(name: str, keeps: bool) -> Step:
        config = LlamaConfig(
            vocab_size=256, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=1,
            num_attention_heads=HEADS, num_key_value_heads=kv_heads, max_position_embeddings=PRETRAINED,
        )  # fmt: skip
        model, cache = LlamaForCausalLM(config).eval(), DynamicCache()
        if name != SDPA:
            live_patch(model, {None: scale(geometry, make_spec(name, max(TARGET, 2 * cached) / PRETRAINED))})
        cache.update(*torch.randn(2, 1, kv_heads, cached, HEAD_DIM), 0)

        def step(number: int) -> torch.Tensor:
            attention_function._reads_cache = reads_cache if keeps else lambda *_: False
            return model(torch.tensor([[number]]), past_key_values=cache).logits

        return step

    again = {name + AGAIN: make_step(name, False) for name in names}
    return {SDPA: make_step(SDPA, True)} | again | {name: make_step(name, True) for name in names}


def run(tokens: int = TARGET, kv_heads: str = f"{HEADS},2", rounds: int = 5) -> Rows:
    """Compare the attention of the distance methods with SDPA, on the CPU in float32, 8 heads of dimension 64.

    A generated token, with far keys rotated again and with kept ones, over --tokens cached keys, a quarter and four
    times as many. A forward pass over --tokens tokens, and its memory above the inputs at half, all and twice the
    tokens. The memory of training with ReRoPE, forward and backward with the gradients of 2 heads.
    """
    methods = [method.name for method in scaling_methods().values() if method.remaps and method.uses_factor]
    for heads in map(int, kv_heads.split(",")):
        caches = (tokens // 4, tokens, 4 * tokens)
        with torch.inference_mode():
            times = [best_times(decoding_steps(methods, cached, heads), 4 * rounds) for cached in caches]
            prefills = {name: make_prefill(name, tokens, heads) for name in [SDPA, UNMAPPED, *methods]}
            seconds = best_times(prefills, rounds + 1)
        for name in times[0]:
            cells = [f"{1000 * best[name]:.2f}  {best[name] / best[SDPA]:.2f}" for best in times]
            columns = [f"{cached:,} keys" for cached in caches]
            row = dict(zip(columns, cells, strict=True))
            yield f"a generated token, {heads} key-value heads: ms, and vs SDPA", {"": name, **row}
        for name, best in seconds.items():
            row = {"": name, "seconds": best, "vs SDPA": best / seconds[SDPA]}
            sizes = (tokens // 2, tokens, 2 * tokens)
            row |= {f"MiB at {size:,}": in_new_process(memory, name, size, heads) for size in sizes}
            yield f"{tokens:,} tokens, {heads} key-value heads", row
    for size in (tokens, 2 * tokens, 4 * tokens):
        mib = in_new_process(memory, "rerope", size, TRAINED_HEADS, True)
        yield f"training rerope, {TRAINED_HEADS} heads", {"": f"{size:,} tokens", "MiB": mib}
