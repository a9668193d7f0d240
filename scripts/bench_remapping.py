"""Benchmarks the attention of the distance methods against SDPA and against full score matrices.

    python scripts/bench_remapping.py            # memory and wall time on the CPU, float32, 8 heads of 64 dimensions
    python scripts/bench_remapping.py --rounds 9
    python scripts/bench_remapping.py --only-decoding

1. Memory of a call above its inputs, each in a new process, against the size of the tokens × tokens scores and
   probabilities of all heads: computed, and measured at a size that fits into memory.
2. Wall time against F.scaled_dot_product_attention(is_causal=True). All run alternately in one process and the best of
   each is reported, so that the ratio is reliable on a busy machine.
3. Wall time of a generated token, in the same way: the attention of one query, and a forward pass of a model of one
   layer with transformers' KV cache.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import psutil
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention

from ropecli.attention.block_attention import BlockAttention
from ropecli.attention.patching import live_patch
from ropecli.attention.rotation import Rotation
from ropecli.live.devices import peak_memory, reset_peak
from ropecli.rope import Branch, Remapping, RopeGeometry
from ropecli.scaling.registry import scaling_methods
from ropecli.scaling.scale import scale
from ropecli.scaling.spec import make_spec

HEADS, HEAD_DIM = 8, 64
PRETRAINED, TARGET = 2048, 8192
THAT_FITS = 4096
SDPA, MATRICES, UNMAPPED = "SDPA", "full matrices", "standard, in blocks"
IDENTITY = Remapping((Branch(np.zeros_like, lambda n: n + 1),))
TRAINED, TRAINED_HEADS, TRAINED_TOKENS = "rerope", 2, (8192, 16_384, 32_768)
CACHED = (2048, 8192, 32_768)
Way = Callable[[], torch.Tensor]
Step = Callable[[int], torch.Tensor]


def make_way(name: str, tokens: int, kv_heads: int, training: bool = False) -> Way:
    torch.manual_seed(0)
    shapes = [(1, heads, tokens, HEAD_DIM) for heads in (TRAINED_HEADS if training else HEADS, kv_heads, kv_heads)]
    query, key, value = (torch.randn(shape, requires_grad=training) for shape in shapes)
    if name == SDPA:
        return lambda: scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    if name == MATRICES:
        return lambda: by_matrices(query, key, value)
    kernel = make_attention(name, TARGET)

    def attend() -> torch.Tensor:
        result = kernel(query, key, value, first_query=0, first_key=0, scaling=HEAD_DIM**-0.5)
        if training:
            result.sum().backward()
        return result

    return attend


def make_attention(name: str, target: int) -> BlockAttention:
    remapping = IDENTITY if name == UNMAPPED else scaling_methods()[name].function(PRETRAINED, target)
    return BlockAttention(remapping, Rotation(10_000.0 ** -(np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))))


def by_matrices(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Scores and probabilities of standard attention as full matrices; a distance method needs more."""
    group = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(group, 1).mT
    for row, of_heads in enumerate(scores.unbind(2)):
        of_heads[..., row + 1 :] = -torch.inf
    return torch.softmax(scores, -1) @ value.repeat_interleave(group, 1)


def matrices(tokens: int) -> float:
    """Size of the scores and probabilities of all heads in float32, MiB."""
    return 2 * HEADS * tokens**2 * 4 / 2**20


def measure_memory(name: str, tokens: int, kv_heads: int, training: bool) -> None:
    make_way(name, 256, kv_heads, training)()  # warm up: threads, code
    way = make_way(name, tokens, kv_heads, training)
    reset_peak(torch.device("cpu"))
    before = psutil.Process().memory_info().rss
    way()
    print(json.dumps((peak_memory(torch.device("cpu")) - before) / 2**20))


def extra_memory(name: str, tokens: int, kv_heads: int, *more: str) -> float:
    """Peak memory of a call above its inputs, including its result, MiB, in a new process."""
    arguments = ["--only", name, "--tokens", str(tokens), "--kv-heads", str(kv_heads), *more]
    run = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(run.stderr)
    return json.loads(run.stdout.splitlines()[-1])


def times(names: Sequence[str], tokens: int, kv_heads: int, rounds: int) -> dict[str, float]:
    """Best wall time of each, seconds."""
    torch.set_grad_enabled(False)
    ways = {name: make_way(name, tokens, kv_heads) for name in names}
    return best_times({name: lambda _, way=way: way() for name, way in ways.items()}, rounds + 1)


def best_times(steps: Mapping[str, Step], rounds: int) -> dict[str, float]:
    """Best wall time of each, seconds. They run alternately; each is given the number of the round."""
    best = dict.fromkeys(steps, float("inf"))
    for number in range(rounds):
        for name, step in steps.items():
            begun = time.perf_counter()
            step(number)
            best[name] = min(best[name], time.perf_counter() - begun)
    return best


def attention_steps(names: Sequence[str], cached: int, kv_heads: int, rounds: int) -> dict[str, Step]:
    """One query over the cached keys, of which there is one more in each round."""
    torch.manual_seed(0)
    shapes = [(1, HEADS, 1, HEAD_DIM)] + [(1, kv_heads, cached + rounds, HEAD_DIM)] * 2
    query, key, value = (torch.randn(shape) for shape in shapes)

    def attend(kernel: BlockAttention, number: int) -> torch.Tensor:
        keys = cached + number
        heads, places = (query, key[:, :, :keys], value[:, :, :keys]), {"first_query": keys - 1, "first_key": 0}
        return kernel(*heads, **places, scaling=HEAD_DIM**-0.5)

    def by_sdpa(number: int) -> torch.Tensor:
        keys = cached + number
        return scaled_dot_product_attention(query, key[:, :, :keys], value[:, :, :keys], enable_gqa=True)

    steps: dict[str, Step] = {SDPA: by_sdpa}
    for name in names:
        steps[name] = partial(attend, make_attention(name, max(TARGET, cached + rounds)))
    return steps


def model_steps(names: Sequence[str], cached: int, kv_heads: int, rounds: int) -> dict[str, Step]:
    """A forward pass of one token in a model of one layer whose KV cache holds as many keys, one more in each round."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    width = HEADS * HEAD_DIM
    geometry = RopeGeometry(HEAD_DIM, HEAD_DIM, 10_000.0, PRETRAINED)

    def make_step(name: str) -> Step:
        config = LlamaConfig(
            vocab_size=256, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=1,
            num_attention_heads=HEADS, num_key_value_heads=kv_heads, max_position_embeddings=PRETRAINED,
        )  # fmt: skip
        model, cache = LlamaForCausalLM(config).eval(), DynamicCache()
        if name != SDPA:
            live_patch(model, {None: scale(geometry, make_spec(name, max(TARGET, 2 * cached) / PRETRAINED))})
        cache.update(*torch.randn(2, 1, kv_heads, cached, HEAD_DIM), 0)

        return lambda number: model(torch.tensor([[number]]), past_key_values=cache).logits

    return {name: make_step(name) for name in (SDPA, *names)}


def compare_decoding(names: Sequence[str], kv_heads: int, rounds: int) -> Table:
    table = Table(
        title=f"a generated token, {HEADS} heads of dimension {HEAD_DIM}, {kv_heads} key-value heads: ms, and vs SDPA",
        title_justify="left",
    )
    table.add_column("")
    columns = {}
    for kind, make in (("attention", attention_steps), ("model", model_steps)):
        for cached in CACHED:
            table.add_column(f"{kind}, {cached:,} keys", justify="right")
            columns[kind, cached] = best_times(make(names, cached, kv_heads, rounds), rounds)
    for name in columns["attention", CACHED[0]]:
        table.add_row(name, *(f"{1000 * one[name]:.2f}  {one[name] / one[SDPA]:.2f}" for one in columns.values()))
    return table


def compare(names: Sequence[str], kv_heads: int, tokens: int, rounds: int) -> Table:
    table = Table(
        title=f"{HEADS} heads of dimension {HEAD_DIM}, {kv_heads} key-value heads; full matrices at {tokens:,} tokens: "
        f"{matrices(tokens):,.0f} MiB",
        title_justify="left",
    )
    sizes = (tokens // 2, tokens, 2 * tokens)
    columns = ["", *(f"MiB at {size:,}" for size in sizes), f"vs matrices at {tokens:,}", "seconds", "vs SDPA"]
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    seconds = times([SDPA, *names], tokens, kv_heads, rounds)
    for name in [SDPA, *names]:
        memory = [extra_memory(name, size, kv_heads) for size in sizes]
        share = f"1/{matrices(tokens) / memory[1]:.0f}"
        row = [
            *(f"{one:,.0f}" for one in memory),
            share,
            f"{seconds[name]:.2f}",
            f"{seconds[name] / seconds[SDPA]:.2f}",
        ]
        table.add_row(name, *row)
    return table


def main(
    only: str = "",
    tokens: int = TARGET,
    kv_heads: int = 0,
    rounds: int = 5,
    training: bool = False,
    only_decoding: bool = False,
) -> None:
    """Print memory and wall time of every distance method."""
    if only:
        with torch.inference_mode(not training):
            measure_memory(only, tokens, kv_heads, training)
        return
    console = Console(width=140)
    methods = [method.name for method in scaling_methods().values() if method.remaps and method.uses_factor]
    with torch.inference_mode():
        for heads in [kv_heads] if kv_heads else [HEADS, 2]:
            console.print(compare_decoding(methods, heads, 4 * rounds))
    if only_decoding:
        return
    for heads in [kv_heads] if kv_heads else [HEADS, 2]:
        console.print(compare([UNMAPPED, *methods], heads, tokens, rounds))
    trained = [extra_memory(TRAINED, size, TRAINED_HEADS, "--training") for size in TRAINED_TOKENS]
    console.print(
        f"{TRAINED}, forward and backward with the gradients of {TRAINED_HEADS} heads: "
        f"{', '.join(f'{one:,.0f} MiB at {size:,}' for one, size in zip(trained, TRAINED_TOKENS, strict=True))}"
    )
    found = extra_memory(MATRICES, THAT_FITS, HEADS)
    console.print(
        f"full matrices at {THAT_FITS:,} tokens: {found:,.0f} MiB measured, {matrices(THAT_FITS):,.0f} MiB computed"
    )


if __name__ == "__main__":
    typer.run(main)
