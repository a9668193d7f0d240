"""Training steps on layers of Llama 8B's shape: model FLOP utilisation (MFU) and peak memory, against Trainer."""

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from bench_parts import plan as bench_plan
from peak_memory import peak_memory, reset_peak

from gpu_parts.measuring import Part, measured_flops, peak_flops
from ropecli.training.memory_plan.estimate import MemoryEstimator, flops_of, model_shape

WAYS: dict[str, dict[str, Any]] = {
    "all parameters": {},
    "LoRA": {"adapter": "lora"},
    "all parameters, offloading": {"offload_activations": True},
    "all parameters, no checkpointing": {"gradient_checkpointing": False},
    "LoRA, no checkpointing": {"adapter": "lora", "gradient_checkpointing": False},
}
TRAINER = "Trainer, checkpointing"
_STEPS = 2
_ROOM = 0.92
"""Share of the card's memory that a step may be estimated to take."""


def run(part: Part) -> None:
    torch.set_float32_matmul_precision("high")  # as `ropecli finetune` does
    part.measure("the card", {"work": "matrix product in bfloat16"}, lambda: measured_flops(part))
    lengths = (64, 128) if part.toy else (8192, 32_768, 131_072)
    layers = 2 if part.toy else most_layers(part, lengths[-1])
    for length in lengths:
        for way, keys in WAYS.items():
            add_row(part, layers, length, f"{way}, {head_of()}", keys, step)
        if head_of() == "Liger":
            add_row(part, layers, length, "all parameters, chunked loss", {}, step_without_liger)
        add_row(part, layers, length, TRAINER, {}, trainer_step)
    for way in ("all parameters", "LoRA"):
        longest(part, layers, way, lengths[-1])


def add_row(part: Part, layers: int, length: int, way: str, keys: dict[str, Any], work: Callable[..., dict]) -> None:
    case = case_of(part, layers, length, keys)
    labels = {"layers": case["layers"], "tokens": length, "way": way}
    part.measure("a step", labels, lambda: work(part, case), needs=20)


def head_of() -> str:
    """The loss that NextTokenLoss takes for a plain head on this machine."""
    return "Liger" if torch.cuda.is_available() and find_spec("liger_kernel") else "chunked loss"


def case_of(part: Part, layers: int, length: int, keys: dict[str, Any]) -> dict[str, Any]:
    """A case of bench_parts/plan.py."""
    shape = part.shape(layers)
    recipe = {"mixed_precision": "bf16", **keys}
    sizes = {"vocab": shape["vocab_size"], "layers": shape["num_hidden_layers"], "length": length}
    return {"type": "llama", **sizes, "more": shape, "recipe": recipe}


def most_layers(part: Part, length: int) -> int:
    """The most layers with which training all parameters is estimated to fit. Memory grows evenly with the layers."""
    memory = torch.cuda.get_device_properties(0).total_memory * _ROOM
    two, four = (bench_plan.predict(case_of(part, layers, length, {}), gpu=True) for layers in (2, 4))
    fitting = 2 + int((memory - two) / ((four - two) / 2))
    return max(1, min(part.shape()["num_hidden_layers"], fitting))


def step(part: Part, case: dict[str, Any], steps: int = _STEPS) -> dict[str, Any]:
    return timed(part, case, lambda tick: bench_plan.train(case, part.device.type, steps, tick))


def step_without_liger(part: Part, case: dict[str, Any]) -> dict[str, Any]:
    with mock.patch("ropecli.training.loss._suits_liger", return_value=False):
        return step(part, case)


def trainer_step(part: Part, case: dict[str, Any]) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class Ticks(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.tick()

        on_train_begin = on_step_end

    ids = torch.randint(case["vocab"], (case["length"],)).tolist()

    def work(tick: Callable[[], None]) -> None:
        callback = Ticks()
        callback.tick = tick
        with tempfile.TemporaryDirectory() as scratch:
            arguments = TrainingArguments(
                output_dir=scratch,
                per_device_train_batch_size=1,
                max_steps=_STEPS,
                bf16=True,
                gradient_checkpointing=True,
                save_strategy="no",
                logging_strategy="no",
                report_to=[],
                use_cpu=part.toy,
                disable_tqdm=True,
            )
            with part.device:
                model = AutoModelForCausalLM.from_config(bench_plan.config_of(case), dtype=torch.float32)
            data = [{"input_ids": ids, "labels": ids}] * _STEPS
            with contextlib.redirect_stdout(sys.stderr):
                Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()

    return timed(part, case, work)


def timed(part: Part, case: dict[str, Any], work: Callable[[Callable[[], None]], None]) -> dict[str, Any]:
    """The fastest step of a training, and its peak memory.

    work: trains, and calls its argument before the first step and after each.
    """
    ticks: list[float] = []

    def tick() -> None:
        part.wait()
        ticks.append(time.perf_counter())

    before = torch.cuda.memory_allocated() if part.device.type == "cuda" else 0
    reset_peak(part.device)
    work(tick)
    seconds = min(later - earlier for earlier, later in pairwise(ticks))
    tokens, flops = case["length"], peak_flops()
    with torch.device("meta"):
        shape = model_shape(MemoryEstimator(bench_plan.config_of(case)).model)
    needed = flops_of(shape, bench_plan.recipe_of(case), tokens, tokens, tokens)
    return {
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "mfu": needed / seconds / flops if flops else None,
        "peak_bytes": peak_memory(part.device) - before,
        "reserved_bytes": torch.cuda.max_memory_reserved() if part.device.type == "cuda" else None,
        "case": case,
    }


def longest(part: Part, layers: int, way: str, fits: int) -> None:
    """Double the length until a step does not fit, or time is up."""
    length = 2 * fits
    for _ in range(1 if part.toy else 8):
        case = case_of(part, layers, length, WAYS[way])
        labels = {"layers": case["layers"], "tokens": length, "way": way}
        found = part.measure("longest sequence", labels, partial(step, part, case, 1), needs=0 if part.toy else 60)
        if "note" in found:
            return
        length *= 2
