"""Benchmarks training steps of `ropecli finetune` against `transformers.Trainer` with default settings.

    python scripts/bench_train.py

Both train the same model on the same sequence, one sequence per step, in float32 on the CPU. Each run is a new process;
runs alternate and the best of each is reported, so that the ratio is reliable on a busy machine.

1. Peak memory of a step above the process's memory before the model is loaded, at a large vocabulary.
2. Tokens per second at sizes where both fit, with and without gradient checkpointing (by default on only where memory
   is short), by wall time and by CPU time, which other jobs on the machine affect less.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
import typer
from rich.console import Console
from rich.table import Table

from ropecli.live.devices import peak_memory, reset_peak

STEPS = 4
SIZES: dict[str, dict[str, int]] = {
    "vocabulary 131,072": {"vocabulary": 131_072, "width": 256, "layers": 2, "tokens": 4096},
    "vocabulary 32,768": {"vocabulary": 32_768, "width": 256, "layers": 4, "tokens": 2048},
    "vocabulary 2,048": {"vocabulary": 2_048, "width": 256, "layers": 4, "tokens": 1024},
}
Meter = Callable[[float], None]


def build(folder: Path, size: dict[str, int]) -> None:
    """Write a checkpoint whose tokens are words, and a text of exactly one sequence."""
    import numpy as np
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size["vocabulary"],
        hidden_size=size["width"],
        intermediate_size=2 * size["width"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["width"] // 64,
        max_position_embeddings=size["tokens"],
        bos_token_id=0,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(size["vocabulary"])}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0").save_pretrained(folder)
    ids = np.random.default_rng(0).integers(0, size["vocabulary"], size["tokens"])
    (folder / "text.txt").write_text(" ".join(f"w{index}" for index in ids), encoding="utf-8")


def ours(folder: Path, tokens: int, meter: Meter, **keys: Any) -> None:
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.training.settings import make_recipe
    from ropecli.training.stages import run_stages

    settings = {"steps": STEPS, "length": tokens, "gradient_accumulation": 1, "warmup_steps": 0, "tracker": "none"}
    recipe = make_recipe(None, {"data": str(folder / "text.txt"), "mixed_precision": "none", **settings, **keys})
    run_stages(open_checkpoint(str(folder)), recipe, folder / "ours", on_step=lambda progress: meter(progress.loss))


def trainer(folder: Path, tokens: int, meter: Meter, **keys: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments

    class Meters(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **others: Any):
            if logs and "loss" in logs:
                meter(logs["loss"])

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer((folder / "text.txt").read_text(encoding="utf-8"))["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=1,  # the default of 8 would need eight times the logits
        max_steps=STEPS,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **keys,
    )
    Trainer(model, arguments, train_dataset=[{"input_ids": ids, "labels": ids}] * STEPS, callbacks=[Meters()]).train()


WAYS: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
    "ropecli": (ours, {}),
    "ropecli, checkpointing": (ours, {"gradient_checkpointing": True}),
    "Trainer": (trainer, {}),
}


def run_one(way: str, folder: Path, tokens: int) -> None:
    """Print peak memory (MiB), first loss and tokens per second as JSON."""
    import accelerate
    import datasets  # noqa: F401
    import transformers  # noqa: F401

    accelerate.Accelerator(cpu=True)
    work, keys = WAYS[way]
    ticks: list[tuple[float, float]] = []
    losses: list[float] = []
    peaks: list[int] = []
    before = psutil.Process().memory_info().rss
    reset_peak(torch.device("cpu"))

    def meter(loss: float) -> None:
        ticks.append((time.perf_counter(), time.process_time()))
        losses.append(loss)
        peaks.append(peak_memory(torch.device("cpu")))

    work(folder, tokens, meter, **keys)
    steps = [[later - earlier for earlier, later in zip(*pair, strict=True)] for pair in pairwise(ticks)]
    wall, cpu = (tokens / min(seconds) for seconds in zip(*steps, strict=True))
    print(json.dumps({"memory": (peaks[-1] - before) / 2**20, "loss": losses[0], "wall": wall, "cpu": cpu}))


def measure(way: str, folder: Path, tokens: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch)
        for file in folder.iterdir():
            (copy / file.name).hardlink_to(file)
        arguments = ["--only", way, "--folder", str(copy), "--tokens", str(tokens)]
        run = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(run.stderr)
    return json.loads(run.stdout.splitlines()[-1])


def main(only: str = "", folder: Path = Path(), tokens: int = 0, rounds: int = 3) -> None:
    """Print the comparison."""
    if only:
        run_one(only, folder, tokens)
        return
    console = Console(width=110)
    for name, size in SIZES.items():
        with tempfile.TemporaryDirectory() as scratch:
            checkpoint = Path(scratch)
            build(checkpoint, size)
            found = [{way: measure(way, checkpoint, size["tokens"]) for way in WAYS} for _ in range(rounds)]
        table = Table(title=f"{name}, width {size['width']}, {size['layers']} layers, {size['tokens']} tokens")
        for column in (
            "",
            "peak of a step",
            "vs Trainer",
            "tokens/s",
            "vs Trainer",
            "tokens/CPU s",
            "vs Trainer",
            "loss",
        ):
            table.add_column(column, justify="right" if column else "left")
        memory = {way: min(one[way]["memory"] for one in found) for way in WAYS}
        wall, cpu = ({way: max(one[way][clock] for one in found) for way in WAYS} for clock in ("wall", "cpu"))
        for way in WAYS:
            table.add_row(
                way,
                f"{memory[way]:,.0f} MiB",
                f"1/{memory['Trainer'] / memory[way]:.1f}",
                f"{wall[way]:,.0f}",
                f"{wall[way] / wall['Trainer']:.2f}",
                f"{cpu[way]:,.0f}",
                f"{cpu[way] / cpu['Trainer']:.2f}",
                f"{found[0][way]['loss']:.4f}",
            )
        console.print(table)


if __name__ == "__main__":
    typer.run(main)
