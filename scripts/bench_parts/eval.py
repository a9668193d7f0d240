"""Evaluation by one pass for all lengths, against a pass per length and against passes without a loss."""

import time
from collections.abc import Sequence

import numpy as np
import torch
from bench import Rows, best_times, in_new_process, memory_meter

from ropecli import open_checkpoint
from ropecli.attention import load_model
from ropecli.data.documents import Document, Documents, read_documents
from ropecli.data.sources import Source
from ropecli.evaluation.driver import score_samples
from ropecli.evaluation.readers.live import LiveReader
from ropecli.evaluation.tasks.perplexity import Perplexity
from ropecli.live.loading import load_tokenizer

VOCABULARY = 131_072


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
    return [cell.ppl for cell in task.cells(score_samples(task, LiveReader(model)))]


@torch.inference_mode()
def bare(model: torch.nn.Module, documents: Documents, length: int) -> None:
    for document in documents.kept:
        model(input_ids=torch.from_numpy(document.ids[:length])[None], use_cache=False)


WAYS = {"one": one_pass, "per length": pass_per_length}


def memory(way: str, tokens: int) -> float:
    """Peak memory above the weights, MiB, with a vocabulary so large that logits take nearly all of it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=tokens, tie_word_embeddings=True,
    )  # fmt: skip
    model, ids = LlamaForCausalLM(config).eval(), np.random.default_rng(0).integers(0, VOCABULARY, tokens)
    meter = memory_meter()
    WAYS[way](model, Documents((Document("random", ids),), 0), [tokens])
    return meter()


def run(
    lengths: str = ",".join(str(256 * step) for step in range(1, 17)),
    documents: int = 6,
    rounds: int = 5,
    memory_tokens: int = 8192,
) -> Rows:
    """Compare one-pass `prefix` evaluation with a forward pass per length with all logits.

    CPU time on the demo at all lengths, and the largest difference of perplexity. Wall time at the longest length
    against bare forward passes. Peak memory above the loaded model at a vocabulary of 131,072.
    """
    checkpoint, numbers = open_checkpoint("demo"), [int(length) for length in lengths.split(",")]
    model, longest = load_model(checkpoint, device="cpu"), numbers[-1]
    texts = read_documents(Source("demo").texts(), load_tokenizer(checkpoint), longest, most=documents)
    pairs = zip(*(way(model, texts, numbers) for way in WAYS.values()), strict=True)
    yield "perplexity", {"": f"largest difference at {lengths}", "ppl": max(abs(one - other) for one, other in pairs)}
    ways = {name: lambda _, way=way: way(model, texts, numbers) for name, way in WAYS.items()}
    cpu = best_times(ways, 1, time.process_time)
    ways = {"one": lambda _: one_pass(model, texts, [longest]), "bare": lambda _: bare(model, texts, longest)}
    wall = best_times(ways, rounds + 1)
    mib = {way: in_new_process(memory, way, memory_tokens) for way in WAYS}
    for label, ours, other in (
        ("CPU seconds, against a pass per length", cpu["one"], cpu["per length"]),
        (f"wall seconds at {longest}, against bare passes", wall["one"], wall["bare"]),
        (f"MiB at {memory_tokens}, against all logits", mib["one"], mib["per length"]),
    ):
        yield "cost", {"": label, "one pass": ours, "other": other, "ratio": ours / other}
