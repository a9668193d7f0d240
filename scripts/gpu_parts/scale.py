"""A Llama of some 100 million parameters: do the demo's findings hold at 30 times its size?

(a) trains it on Python source with a context of 1,024 tokens and keeps it; (b) compares methods, (c) fine-tuning.
"""

import json
import os
import shutil
import sysconfig
import time
import zlib
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import train_demo

import ropecli
from gpu_parts.measuring import Part
from ropecli.demo import corpus
from ropecli.evaluation.report import Cell, loss_change
from ropecli.scaling.registry import scaling_methods

METHODS = [
    "yarn",
    "none",
    "linear",
    "ntk",
    "dynamic",
    "llama3",
    "ntk-by-parts",
    "rerope",
    "leaky-rerope",
    "self-extend",
    "dual-chunk",
    "lm-infinite",
    "streaming",
]
FINETUNED = -0.09, -0.078
"""Changes on the demo (README.md of this folder): whole sequences, and short ones with gaps."""
_LONGEST = 1_000_000
"""Characters of a source file; longer ones are tables."""
_HELD_OUT = 97
"""One file in this many is held out, by the hash of its text."""
_SEEN: set[int] = set()
"""Hashes of the held-out lines, in a worker process."""


@dataclass(frozen=True)
class Size:
    """window: pretraining length, tokens. batch: sequences per step. text: characters to train on."""

    window: int
    vocabulary: int
    width: int
    layers: int
    heads: int
    batch: int
    text: int
    documents: int
    steps: int
    minutes: float


FULL = Size(1024, 16_384, 768, 12, 12, 64, 400_000_000, 32, 100, 5.5)
TOY = Size(64, 512, 64, 2, 4, 4, 1_000_000, 2, 3, 0.05)


def size_of(part: Part) -> Size:
    return TOY if part.toy else FULL


def run_a(part: Part) -> None:
    checkpoint = part.work / "model"
    if checkpoint.exists():
        kept = json.loads((part.work / "training.json").read_text(encoding="utf-8"))
        part.measure("training", {"model": "kept from an earlier run"}, lambda: kept)
        return
    part.measure("training", {"model": "trained now"}, lambda: train(part))


def train(part: Part) -> dict[str, Any]:
    """Train the model for some minutes, and write it to the work folder."""
    size, work = size_of(part), part.work
    begun = time.monotonic()
    texts, held_out = read_sources(size)
    folder = work / "model.tmp"
    shutil.rmtree(folder, ignore_errors=True)
    for kind, found in (("held-out", held_out), ("text", dict(enumerate(texts)))):
        write_texts(work / kind, found)
    tokenizer = train_demo.train_tokenizer(texts[: 4 if part.toy else 4000], folder, size.vocabulary, size.window)
    batches = (tokenizer(texts[start : start + 1000])["input_ids"] for start in range(0, len(texts), 1000))
    stream = np.concatenate([np.array(ids, dtype=np.uint16) for batch in batches for ids in batch])
    prepared = time.monotonic() - begun
    model = part.llama_of(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=size.width * 11 // 4,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 2,
        head_dim=size.width // size.heads,
        max_position_embeddings=size.window,
        tie_word_embeddings=True,
    )
    minutes = min(size.minutes, (part.left() - 20) / 60)
    step, loss = fit(part, model, stream, size, minutes * 60)
    model.to(torch.bfloat16).save_pretrained(folder)
    folder.replace(work / "model")
    found = {
        "parameters": sum(one.numel() for one in model.parameters()),
        "corpus tokens": len(stream),
        "seen tokens": step * size.batch * size.window,
        "steps": step,
        "last loss": loss,
        "minutes": minutes,
        "seconds of preparation": prepared,
    }
    (work / "training.json").write_text(json.dumps(found), encoding="utf-8")
    return found


def fit(part: Part, model: Any, stream: np.ndarray, size: Size, seconds: float) -> tuple[int, float]:
    """Train until the time is up; the learning rate follows the time. Returns steps and the mean of the last losses."""
    optimizers = train_demo.make_optimizers(model.train(), 3e-3)
    begun, step, losses = time.monotonic(), 0, []
    while (passed := (time.monotonic() - begun) / seconds) < 1:
        rate = min(1.0, (passed + 1e-3) / 0.02, (1 - passed) / 0.4)
        rows = train_demo.batch_at(stream, 0, step, size.batch, part.device.type, size.window)
        losses.append(train_demo.update(model, optimizers, rows, 3e-3 * rate))
        step += 1
    return step, float(np.mean(losses[-50:]))


def read_sources(size: Size) -> tuple[list[str], dict[str, str]]:
    """Training texts, and held-out texts by name: Python files of the standard library and the installed packages.

    A training text shares no eight consecutive lines with a held-out one.
    """
    roots = [corpus.stdlib_root(), Path(sysconfig.get_paths()["purelib"]), Path(torch.__file__).parents[1]]
    files = sorted({path for root in roots for path in root.rglob("*.py")})
    held_out = dict(corpus.held_out_files())
    texts: list[str] = []
    total = 0
    for path in files:
        text = corpus.read_source(path) if path.stat().st_size <= _LONGEST else None
        if not text or total > size.text:
            continue
        if is_held_out(text):
            held_out[f"{len(held_out)}-{path.name}"] = text
        else:
            texts.append(text)
            total += len(text)
    seen = set().union(*map(corpus.line_windows, held_out.values()))
    with ProcessPoolExecutor(os.cpu_count(), initializer=_SEEN.update, initargs=(seen,)) as pool:
        new = pool.map(is_new, texts, chunksize=64)
        texts = [text for text, keep in zip(texts, new, strict=True) if keep]
    return texts, held_out


def is_new(text: str) -> bool:
    """Return whether the text shares no lines with a held-out text; in a worker process."""
    return _SEEN.isdisjoint(corpus.line_windows(text))


def is_held_out(text: str) -> bool:
    return len(text) > 20_000 and zlib.crc32(text.encode()) % _HELD_OUT == 0


def write_texts(folder: Path, texts: dict[Any, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = (json.dumps({"text": text, "name": str(name)}) for name, text in texts.items())
    (folder / "text.jsonl").write_text("\n".join(rows), encoding="utf-8")


def run_b(part: Part) -> None:
    """Methods at ×4 and ×8, in memory, and the same on the demo. Changes are against yarn."""
    for factor in (4, 8):
        distance = [method.name for method in scaling_methods().values() if method.remaps and method.uses_factor]
        methods = ["yarn", "rerope"] if part.toy else [*METHODS, *distance]
        own: list[Cell] = []
        demo: list[Cell] = []
        for method in methods:
            part.measure(
                "methods",
                {"factor": f"×{factor}", "method": method},
                partial(patched_both, part, method, factor, own, demo),
                needs=10,
            )


def patched_both(part: Part, method: str, factor: int, own: list[Cell], demo: list[Cell]) -> dict[str, Any]:
    found = ppl(part, model_of(part), factor, own, methods=method, factors=factor)
    of_demo = ppl(part, "demo", factor, demo, methods=method, factors=factor)
    return {**found, "the demo's change": percent(of_demo["change"])}


def model_of(part: Part) -> str:
    folder = part.work / "model"
    if not folder.exists():
        raise RuntimeError(f"no model in {folder}: run scripts/gpu scale-a first")
    return str(folder)


def ppl(part: Part, checkpoint: Any, times: int, base: list[Cell], **patch: Any) -> dict[str, Any]:
    """Perplexity at the pretraining length and the target on the same last tokens, and the change against `base`.

    base: the cells to compare with; filled by the first call.
    """
    size = size_of(part)
    demo = checkpoint == "demo"
    window = 256 if demo else size.window
    reports = ropecli.eval_ppl(
        str(checkpoint),
        data="demo" if demo else str(part.work / "held-out" / "text.jsonl"),
        lengths=[window, window * times],
        protocol="tail",
        targets=window // 2,
        max_documents=size.documents,
        **patch,
    )
    short, long = reports.reports[0].cells
    base += [] if base else [long]
    change = None if base[0] is long else loss_change(long, base[0])
    return {
        "ppl at the pretraining length": short.ppl,
        "ppl at the target": long.ppl,
        "change": change and change.change,
        "interval": change and f"{percent(change.low)} to {percent(change.high)}",
        "documents": long.samples,
    }


def percent(value: float | None) -> str | None:
    return None if value is None else f"{value:+.1%}"


def run_c(part: Part) -> None:
    """Fine-tuning after yarn ×4, on whole sequences and on short ones with gaps. Changes are against untuned yarn."""
    size = size_of(part)
    base: list[Cell] = []
    patched = fresh(part, "yarn-4")
    part.measure("fine-tuning", {"way": "yarn ×4, not trained"}, partial(untrained, part, patched, base))
    whole = {"length": 4 * size.window, "batch_size": 4}
    gaps = {"length": size.window, "batch_size": 16, "positions": "pose", "settings": {"pose_chunks": 16}}
    for options, demo in zip((whole, gaps), FINETUNED, strict=True):
        way = f"sequences of {options['length']:,}{', PoSE' if 'positions' in options else ''}"
        part.measure("fine-tuning", {"way": way}, partial(finetuned, part, patched, options, base, demo), needs=30)


def untrained(part: Part, patched: Path, base: list[Cell]) -> dict[str, Any]:
    ropecli.patch(model_of(part), method="yarn", factor=4, output=patched)
    return ppl(part, patched, 4, base)


def finetuned(part: Part, patched: Path, options: dict[str, Any], base: list[Cell], demo: float) -> dict[str, Any]:
    folder, steps = fresh(part, "finetuned"), size_of(part).steps
    settings = {
        "warmup_steps": steps // 10,
        "max_documents": 40 if part.toy else 8000,
        "learning_rate": 5e-4,
        "gradient_accumulation": 1,
        "tracker": "none",
        **options.pop("settings", {}),
    }
    begun = time.monotonic()
    ropecli.finetune(str(patched), data=training_text(part), output=folder, steps=steps, settings=settings, **options)
    seconds = time.monotonic() - begun
    return {**ppl(part, folder, 4, base), "the demo's change": percent(demo), "seconds": seconds}


def training_text(part: Part) -> str:
    return str(part.work / "text" / "text.jsonl")


def fresh(part: Part, name: str) -> Path:
    """An output folder that does not exist."""
    folder = part.work / name
    shutil.rmtree(folder, ignore_errors=True)
    return folder
