"""Shared by all parts: rows with a deadline, timing, the card's speed, a model of a common size, training runs."""

import gc
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers

from gpu_parts.tables import line
from ropecli.training.memory_plan.hardware import GPUS

LLAMA_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
}
"""The shape of Llama 3.1 8B."""
TOY = {
    **LLAMA_8B,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_MATRIX = 8192


class Part:
    """One part's rows, written to OUTPUT/NAME.json after each.

    toy: whether this is a dry run. seconds: time for the part.
    """

    def __init__(self, name: str, toy: bool, output: Path, seconds: float) -> None:
        self.name, self.toy, self.output = name, toy, output
        self.failed = False
        self._end = time.monotonic() + seconds
        if not toy and not torch.cuda.is_available():
            sys.exit("torch finds no CUDA device. --dry-run runs on the CPU.")
        self.device = torch.device("cpu" if toy else "cuda")
        self.report: dict[str, Any] = {"part": name, "machine": describe_machine(self.device), "tables": {}}

    def left(self) -> float:
        """Seconds left."""
        return self._end - time.monotonic()

    def measure(
        self, table: str, labels: dict[str, Any], work: Callable[[], dict[str, Any]], *, needs: float = 0
    ) -> dict[str, Any]:
        """Add a row: the labels, and what `work` returns. A value `ok` that is False fails the part.

        Running out of memory is a result; another error is noted, and the next row follows. needs: seconds without
        which the row is skipped.
        """
        try:
            if self.left() < needs:
                values: dict[str, Any] = {"note": "not run: no time left"}
            else:
                values = work()
        except torch.OutOfMemoryError:
            values = {"note": "out of memory"}
        except Exception as error:
            traceback.print_exc()
            self.failed = True
            values = {"note": f"failed: {' '.join(str(error).split())[:200] or type(error).__name__}"}
        self.failed |= values.get("ok") is False
        row = {**labels, **values}
        self.report["tables"].setdefault(table, []).append(row)
        (self.output / f"{self.name}.json").write_text(json.dumps(self.report, indent=1), encoding="utf-8")
        print(f"{self.name}: {line(row)}", flush=True)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return values

    def read(self, name: str) -> dict[str, Any]:
        """The tables that another part wrote; empty if it has not run."""
        file = self.output / f"{name}.json"
        return json.loads(file.read_text(encoding="utf-8"))["tables"] if file.exists() else {}

    def seconds_of(self, work: Callable[[], Any], rounds: int = 1) -> float:
        """Shortest wall time of several rounds."""
        best = float("inf")
        for _ in range(rounds):
            self.wait()
            begun = time.perf_counter()
            work()
            self.wait()
            best = min(best, time.perf_counter() - begun)
        return best

    def wait(self) -> None:
        """Wait for the GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def llama(self, layers: int | None = None, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
        """A Llama of 8B shape with random weights, in evaluation mode."""
        torch.manual_seed(0)
        config = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, **self.shape(layers)}
        with self.device:
            model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**config), dtype=dtype)
        return model.eval()

    def shape(self, layers: int | None = None) -> dict[str, Any]:
        """Settings of LlamaConfig: 8B, or a toy."""
        own = {} if layers is None or self.toy else {"num_hidden_layers": layers}
        return {**(TOY if self.toy else LLAMA_8B), **own}


def describe_machine(device: torch.device) -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    versions = {
        "date": date.today().isoformat(),
        "commit": commit.stdout.strip() or "unknown",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if device.type != "cuda":
        return {"device": "CPU", **versions}
    properties = torch.cuda.get_device_properties(0)
    memory = f"{properties.total_memory / 2**30:.0f} GiB"
    return {"device": f"{torch.cuda.device_count()} × {properties.name}", "memory": memory, **versions}


def peak_flops() -> float | None:
    """Dense bfloat16 operations per second of this card by its data sheet; None if `plan` does not know the card."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(0).lower().replace(" ", "")
    return next((flops for card, flops in GPUS.items() if card in name), None)


def measured_flops(part: Part) -> dict[str, Any]:
    """Operations per second of a large bfloat16 matrix product, and the data sheet's."""
    size = 256 if part.toy else _MATRIX
    matrix = torch.randn(size, size, device=part.device, dtype=torch.bfloat16)
    seconds = part.seconds_of(lambda: matrix @ matrix, rounds=10)
    return {"tflops": 2 * size**3 / seconds / 1e12, "data_sheet": (peak_flops() or 0) / 1e12 or None}


def losses_of_run(
    folder: Path,
    name: str,
    settings: dict[str, Any],
    launcher: Sequence[str] = (sys.executable,),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> list[float]:
    """Losses of `ropecli finetune FOLDER/patched`, in nats, step by step. settings: recipe keys."""
    command = [*launcher, "-m", "ropecli", "finetune", folder / "patched", "--data", "demo-train"]
    command += ["--output", folder / name, "--tracker", "none", "--set", "max_documents=40"]
    command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, stderr=sys.stderr, check=True)
    lines = map(json.loads, (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def compare_losses(found: Sequence[float], expected: Sequence[float], allowed: float) -> dict[str, Any]:
    """The values of a row. allowed: largest relative difference of a step's losses."""
    worst = max(abs(one / other - 1) for one, other in zip(found, expected, strict=True))
    return {
        "last loss": found[-1],
        "expected": expected[-1],
        "difference": worst,
        "allowed": allowed,
        "ok": worst <= allowed,
    }
