"""Measures one-pass `prefix` evaluation against the plain way: a fresh forward pass per length, logits and all.

    python scripts/bench_eval.py            # time and equality on the demo, memory at a 128k vocabulary
    python scripts/bench_eval.py --no-memory

1. CPU time at many lengths, and that both ways give the same perplexity.
2. Wall time of scoring against a bare forward of the same model on the same tokens, without any loss.
3. Memory above the loaded model, each way's own peak in a fresh process.

Ways are run one after the other in one process, several times over, so that their ratio holds on a busy machine.
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
from ropecli.evaluation.perplexity import evaluate_perplexity
from ropecli.live.loading import load_tokenizer

VOCABULARY = 131_072
TOKENS = 8_192


@torch.inference_mode()
def plain_way(model: torch.nn.Module, documents: Documents, lengths: Sequence[int]) -> list[float]:
    """Perplexity by a forward pass per document and length, with all logits at once."""
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
    return [row.ppl for row in evaluate_perplexity(model, documents, lengths)]


def wide_model() -> tuple[torch.nn.Module, Documents]:
    """A tiny decoder with a large vocabulary, so that logits are nearly all the memory there is."""
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
    """Peak memory of one way above the loaded model, MiB, in a process of its own."""
    run = subprocess.run([sys.executable, __file__, "--only", way], capture_output=True, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def measure_memory(way: str) -> None:
    model, documents = wide_model()
    before = psutil.Process().memory_info().rss
    {"plain": plain_way, "one-pass": one_pass}[way](model, documents, [TOKENS])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps((peak - before) / 2**20))


def compare_on_demo(lengths: list[int], most: int) -> Table:
    checkpoint = open_checkpoint("demo")
    model = load_model(checkpoint, device="cpu")
    documents = read_documents(read_texts("demo"), load_tokenizer(checkpoint), lengths[-1], most=most)
    timings, results = {}, {}
    for way in (one_pass, plain_way):
        way(model, documents, lengths[:1])  # warm up
        begun = time.process_time()
        results[way] = way(model, documents, lengths)
        timings[way] = time.process_time() - begun
    table = Table(title=f"prefix at {len(lengths)} lengths up to {lengths[-1]}, {len(documents.kept)} documents, demo")
    for name in ("length", "one pass", "fresh pass per length", "difference"):
        table.add_column(name, justify="right")
    for length, ours, theirs in zip(lengths, results[one_pass], results[plain_way], strict=True):
        table.add_row(f"{length}", f"{ours:.5f}", f"{theirs:.5f}", f"{abs(ours - theirs):.1e}")
    table.add_section()
    ratio = timings[plain_way] / timings[one_pass]
    table.add_row("CPU time", f"{timings[one_pass]:.1f} s", f"{timings[plain_way]:.1f} s", f"{ratio:.1f} times")
    return table


def against_bare_forward(length: int, most: int, rounds: int = 5) -> tuple[float, float]:
    """Wall seconds of (an evaluation, a forward pass with its logits) over the same documents; the best of some."""
    checkpoint = open_checkpoint("demo")
    model = load_model(checkpoint, device="cpu")
    documents = read_documents(read_texts("demo"), load_tokenizer(checkpoint), length, most=most)
    batches = [torch.from_numpy(document.ids[:length])[None] for document in documents.kept]

    @torch.inference_mode()
    def bare() -> None:
        for ids in batches:
            model(input_ids=ids, use_cache=False)

    ways = (lambda: evaluate_perplexity(model, documents, [length]), bare)
    seconds = [[_wall_time(way) for way in ways] for _ in range(rounds + 1)][1:]
    ours, theirs = zip(*seconds, strict=True)
    return min(ours), min(theirs)


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
    """Print both ways side by side."""
    if only:
        measure_memory(only)
        return
    console = Console()
    wanted = [int(length) for length in lengths.split(",")]
    console.print(compare_on_demo(wanted, documents))
    ours, bare = against_bare_forward(wanted[-1], documents)
    console.print(
        f"wall time at {wanted[-1]} tokens, {documents} documents: {ours:.2f} s scored, {bare:.2f} s for bare "
        f"forwards: {ours / bare:.2f} times"
    )
    if memory:
        ours, plain = extra_memory("one-pass"), extra_memory("plain")
        console.print(
            f"extra memory at {TOKENS} tokens, vocabulary {VOCABULARY}: {ours:.0f} MiB in one pass by chunks, "
            f"{plain:.0f} MiB with all logits: {plain / ours:.1f} times"
        )


if __name__ == "__main__":
    typer.run(main)
