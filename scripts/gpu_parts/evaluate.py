"""Evaluation of a Llama of 8B shape: speed and peak memory of one pass, of chunks, and of a forward with all logits."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from peak_memory import peak_memory, reset_peak

from gpu_parts.measuring import Part, measured_flops
from ropecli.data.documents import Document, Documents
from ropecli.evaluation.readers.live import LiveReader
from ropecli.evaluation.tasks.perplexity import Perplexity


def run(part: Part) -> None:
    part.measure("the card", {"work": "matrix product in bfloat16"}, lambda: measured_flops(part))
    lengths = (64, 128, 256) if part.toy else (8192, 32_768, 131_072)
    chunk = lengths[0] // 2 if part.toy else lengths[0]
    model = part.llama()
    score(model, random_document(model, lengths[0]), [lengths[0]])  # warm up
    for length in lengths:
        document = random_document(model, length)
        ways: dict[str, Callable[[], Any]] = {
            "one pass": lambda document=document, length=length: score(model, document, [length]),
            f"chunks of {chunk:,}": lambda document=document, length=length: score(model, document, [length], chunk),
            "transformers, all logits": lambda document=document: forward(model, document),
        }
        for way, work in ways.items():
            part.measure(
                "one sequence", {"tokens": length, "way": way}, lambda work=work, n=length: cost(part, work, n)
            )
    longest = lengths[1]
    several = [longest * step // 8 for step in range(1, 9)]
    document = random_document(model, longest)

    def separate() -> None:
        for length in several:
            score(model, document, [length])

    for way, work in (("one pass", lambda: score(model, document, several)), ("a pass per length", separate)):
        labels = {"lengths": f"8 up to {longest:,}", "way": way}
        part.measure("eight lengths", labels, lambda work=work: cost(part, work, longest))


def cost(part: Part, work: Callable[[], Any], tokens: int) -> dict[str, Any]:
    """Seconds, tokens per second and peak memory, the model included. `work` may return its own seconds."""
    reset_peak(part.device)
    found: list[Any] = []
    seconds = part.seconds_of(lambda: found.append(work()))
    own = found[0]
    seconds = own if isinstance(own, float) else seconds
    return {"seconds": seconds, "tokens_per_second": tokens / seconds, "peak_bytes": peak_memory(part.device)}


def score(model: Any, document: Documents, lengths: list[int], chunk: int | None = None) -> float:
    """Seconds of scoring by the protocol prefix. The test that chunks give the same losses is not counted."""
    task, reader = Perplexity(document, lengths), LiveReader(model, chunk=chunk)
    reader.prepare(*task.longest())
    if chunk and not reader.cache_is_exact:
        raise RuntimeError(f"The model was not read in chunks of {chunk} tokens.")
    started = time.monotonic()
    task.score(reader, task.samples(one_pass=True))
    return time.monotonic() - started


@torch.inference_mode()
def forward(model: Any, document: Documents) -> None:
    ids = torch.from_numpy(document.kept[0].ids)[None].to(model.device)
    model(input_ids=ids, use_cache=False).logits  # noqa: B018


def random_document(model: Any, length: int) -> Documents:
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, length)
    return Documents((Document("random", ids),), 0)
