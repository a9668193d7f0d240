"""Benchmarks one-pass `prefix` evaluation against separate forward passes per length with full logits.

    python scripts/bench_eval.py            # time and equality on the demo, memory at a 128k vocabulary
    python scripts/bench_eval.py --no-memory

1. CPU time at many lengths, and equality of the perplexities.
2. Wall time of scoring against forward passes of the same model on the same tokens, without a loss.
3. Peak memory above the loaded model, each in a new process.

The alternatives run in turn in one process, several times, so that their ratio is reliable on a busy machine.
"""

import json
import resource
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

from ropecli import open_checkpoint
from ropecli.attention import load_model
from ropecli.data.documents import Document, Documents, read_documents
from ropecli.data.sources import read_texts
from ropecli.evaluation.driver import read
from ropecli.evaluation.readers.live import LiveReader
from ropecli.evaluation.tasks.perplexity import Perplexity
from ropecli.live.loading import load_tokenizer

VOCABULARY = 131_072
TOKENS = 8_192


@torch.inference_mode()
def pass_per_length(model: torch.nn.Module, documents: Documents, lengths: Sequence[int]) -> list[float]:
    """Perplexity from one forward pass per document and length, with all logits at once."""
    results = []
    for length in lengths:
        total, tokens = 0.0, 0
        for document in documents.kept:
            ids = torch.from_numpy(document.ids[:length])[None]
            logits = model(input_ids=ids, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="sum")
            total, tokens = total + loss.double().item(), tokens + length - 1
        results.append(float(np.exp(total / tokens)))
    return results


def one_pass(model: torch.nn.Module, documents: Documents, lengths: Sequence[int]) -> list[float]:
    task = Perplexity(documents, lengths)
    return [cell.ppl for cell in task.cells(read(task, LiveReader(model)))]


def wide_model() -> tuple[torch.nn.Module, Documents]:
    """A tiny decoder with a large vocabulary, so that logits take nearly all the memory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=TOKENS,
        tie_word_embeddings=True,
    )
    ids = np.random.default_rng(0).integers(0, VOCABULARY, TOKENS)
    return LlamaForCausalLM(config).eval(), Documents((Document("random", ids),), 0)


def extra_memory(way: str) -> float:
    """Peak memory above the loaded model, MiB, in a new process."""
    run = subprocess.run([sys.executable, __file__, "--only", way], capture_output=True, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def measure_memory(way: str) -> None:
    model, documents = wide_model()
    before = psutil.Process().memory_info().rss
    {"per-length": pass_per_length, "one-pass": one_pass}[way](model, documents, [TOKENS])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps((peak - before) / 2**20))


def compare_on_demo(lengths: list[int], most: int) -> Table:
    checkpoint = open_checkpoint("demo")
    model = load_model(checkpoint, device="cpu")
    documents = read_documents(read_texts("demo"), load_tokenizer(checkpoint), lengths[-1], most=most)
    timings, results = {}, {}
    for way in (one_pass, pass_per_length):
        way(model, documents, lengths[:1])  # warm up
        begun = time.process_time()
        results[way] = way(model, documents, lengths)
        timings[way] = time.process_time() - begun
    table = Table(title=f"prefix at {len(lengths)} lengths up to {lengths[-1]}, {len(documents.kept)} documents, demo")
    for name in ("length", "one pass", "pass per length", "difference"):
        table.add_column(name, justify="right")
    for length, ours, other in zip(lengths, results[one_pass], results[pass_per_length], strict=True):
        table.add_row(f"{length}", f"{ours:.5f}", f"{other:.5f}", f"{abs(ours - other):.1e}")
    table.add_section()
    ratio = timings[pass_per_length] / timings[one_pass]
    table.add_row("CPU time", f"{timings[one_pass]:.1f} s", f"{timings[pass_per_length]:.1f} s", f"{ratio:.1f}x")
    return table


def against_bare_forward(length: int, most: int, rounds: int = 5) -> tuple[float, float]:
    """Wall seconds of (evaluation, forward passes with logits) over the same documents, best of several rounds."""
    checkpoint = open_checkpoint("demo")
    model = load_model(checkpoint, device="cpu")
    documents = read_documents(read_texts("demo"), load_tokenizer(checkpoint), length, most=most)
    batches = [torch.from_numpy(document.ids[:length])[None] for document in documents.kept]

    @torch.inference_mode()
    def bare() -> None:
        for ids in batches:
            model(input_ids=ids, use_cache=False)

    ways = (lambda: one_pass(model, documents, [length]), bare)
    seconds = [[_wall_time(way) for way in ways] for _ in range(rounds + 1)][1:]
    scored, forward = zip(*seconds, strict=True)
    return min(scored), min(forward)


def _wall_time(way: Callable[[], object]) -> float:
    begun = time.perf_counter()
    way()
    return time.perf_counter() - begun


def main(
    lengths: str = ",".join(str(256 * step) for step in range(1, 17)),
    documents: int = 6,
    memory: bool = True,
    only: str = "",
) -> None:
    """Print the comparison."""
    if only:
        measure_memory(only)
        return
    console = Console()
    wanted = [int(length) for length in lengths.split(",")]
    console.print(compare_on_demo(wanted, documents))
    ours, bare = against_bare_forward(wanted[-1], documents)
    console.print(
        f"wall time at {wanted[-1]} tokens, {documents} documents: {ours:.2f} s for evaluation, {bare:.2f} s for "
        f"forward passes only, ratio {ours / bare:.2f}"
    )
    if memory:
        ours, full = extra_memory("one-pass"), extra_memory("per-length")
        console.print(
            f"extra memory at {TOKENS} tokens, vocabulary {VOCABULARY}: {ours:.0f} MiB for one pass in chunks, "
            f"{full:.0f} MiB with all logits, ratio {full / ours:.1f}"
        )


if __name__ == "__main__":
    typer.run(main)
