"""Benchmarks the attention of the distance methods against SDPA and against full score matrices.

    python scripts/bench_remapping.py            # memory and wall time on the CPU, float32, 8 heads of 64 dimensions
    python scripts/bench_remapping.py --rounds 9

1. Memory of a call above its inputs, each in a new process, against the size of the tokens × tokens scores and
   probabilities of all heads: computed, and measured at a size that fits into memory.
2. Wall time against F.scaled_dot_product_attention(is_causal=True). All run alternately in one process and the best of
   each is reported, so that the ratio is reliable on a busy machine.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import psutil
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention

from ropecli.attention.block_attention import BlockAttention
from ropecli.attention.rotation import Rotation
from ropecli.live.devices import peak_memory, reset_peak
from ropecli.rope import Branch, Remapping
from ropecli.scaling.registry import scaling_methods

HEADS, HEAD_DIM = 8, 64
PRETRAINED, TARGET = 2048, 8192
THAT_FITS = 4096
SDPA, MATRICES, UNMAPPED = "SDPA", "full matrices", "standard, in blocks"
IDENTITY = Remapping((Branch(np.zeros_like, lambda n: n + 1),))
TRAINED, TRAINED_HEADS, TRAINED_TOKENS = "rerope", 2, (8192, 16_384, 32_768)
Way = Callable[[], torch.Tensor]


def make_way(name: str, tokens: int, kv_heads: int, training: bool = False) -> Way:
    torch.manual_seed(0)
    shapes = [(1, heads, tokens, HEAD_DIM) for heads in (TRAINED_HEADS if training else HEADS, kv_heads, kv_heads)]
    query, key, value = (torch.randn(shape, requires_grad=training) for shape in shapes)
    if name == SDPA:
        return lambda: scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    if name == MATRICES:
        return lambda: by_matrices(query, key, value)
    remapping = IDENTITY if name == UNMAPPED else scaling_methods()[name].function(PRETRAINED, TARGET)
    kernel = BlockAttention(remapping, Rotation(10_000.0 ** -(np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))))

    def attend() -> torch.Tensor:
        result = kernel(query, key, value, first_query=0, first_key=0, scaling=HEAD_DIM**-0.5)
        if training:
            result.sum().backward()
        return result

    return attend


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
    best = dict.fromkeys(names, float("inf"))
    for _ in range(rounds + 1):
        for name, way in ways.items():
            begun = time.perf_counter()
            way()
            best[name] = min(best[name], time.perf_counter() - begun)
    return best


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


def main(only: str = "", tokens: int = TARGET, kv_heads: int = 0, rounds: int = 5, training: bool = False) -> None:
    """Print memory and wall time of every distance method."""
    if only:
        with torch.inference_mode(not training):
            measure_memory(only, tokens, kv_heads, training)
        return
    console = Console(width=110)
    names = [UNMAPPED, *(method.name for method in scaling_methods().values() if method.remaps and method.uses_factor)]
    for heads in [kv_heads] if kv_heads else [HEADS, 2]:
        console.print(compare(names, heads, tokens, rounds))
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
