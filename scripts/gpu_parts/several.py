"""All GPUs of this machine give what one gives: DDP, FSDP2, shared sequences; a model spread over them."""

import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml

import ropecli
from gpu_parts.measuring import Part, compare_losses, losses_of_run
from ropecli.training.recipe_files import recipe_files

ALLOWED = {"none": 1e-3, "bf16": 0.01}
"""Relative difference of the losses by precision."""
SETTINGS = {"steps": 4, "warmup_steps": 0}


def run(part: Part) -> None:
    count = 2 if part.toy else torch.cuda.device_count()
    if count < 2:
        part.measure("several GPUs", {}, lambda: {"note": "this machine has one GPU"})
        return
    part.measure("device map", {"check": "demo, spread over devices"}, lambda: spread(part))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        ropecli.patch("demo", method="yarn", factor=4, output=folder / "patched")
        alone: dict[tuple[int, str], list[float]] = {}

        def losses_alone(passes: int, precision: str) -> list[float]:
            """One process; with as many passes per step as there would be processes, unless they share a sequence."""
            if (passes, precision) not in alone:
                gpu = {} if part.toy else {"CUDA_VISIBLE_DEVICES": "0"}
                settings = {"gradient_accumulation": passes, "mixed_precision": precision, **SETTINGS}
                name = f"alone-{passes}-{precision}"
                alone[passes, precision] = losses_of_run(folder, name, settings, environment=gpu)
            return alone[passes, precision]

        for name, launcher, shared, precision in engines(folder, count, part.toy):

            def work(name=name, launcher=launcher, shared=shared, precision=precision) -> dict[str, Any]:
                expected = losses_alone(1 if shared else count, precision)
                return compare(folder, name, launcher, precision, expected, count if shared else 1)

            part.measure("several GPUs", {"engine": name, "processes": count, "precision": precision}, work)


def spread(part: Part) -> dict[str, Any]:
    """Perplexity of the demo over two GPUs (a dry run: over memory and disk) against one device."""
    few = {"data": "demo", "lengths": [256], "max_documents": 2, "dtype": "float32"}
    alone = ropecli.eval_ppl("demo", device=part.device.type, **few).reports[0]
    found = ropecli.eval_ppl(
        "demo", device_map="auto", max_memory="cpu=8MB" if part.toy else "0=8MB,1=20MB", **few
    ).reports[0]
    difference = abs(found.cells[0].ppl / alone.cells[0].ppl - 1)
    several = "," in found.device
    return {"devices": found.device, "difference": difference, "allowed": 1e-4, "ok": several and difference <= 1e-4}


def engines(folder: Path, count: int, toy: bool) -> list[tuple[str, list[str], bool, str]]:
    """(name, launch command, whether the processes share each sequence, precision). A CPU has no FSDP2."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", f"{count}"]
    sharded = torchrun if toy else launch(folder, "8-gpu-fsdp2", count)
    found = [("DDP", torchrun, False, "none")]
    if not toy:
        found.append(("FSDP2", sharded, False, "none"))
    if find_spec("ringmaster"):
        found.append(("shared sequences", sharded, True, "none"))
    return found


def launch(folder: Path, name: str, count: int) -> list[str]:
    """`accelerate launch` with one of our configurations for eight GPUs, for `count` processes."""
    config = yaml.safe_load(recipe_files("accelerate")[name].text)
    config |= {"num_processes": count, "mixed_precision": "no"}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    return [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file)]


def compare(
    folder: Path, name: str, launcher: list[str], precision: str, alone: list[float], size: int
) -> dict[str, Any]:
    """size: processes that share each sequence."""
    settings = {"gradient_accumulation": 1, "mixed_precision": precision, "context_parallel_size": size, **SETTINGS}
    found = losses_of_run(folder, name.replace(" ", "-"), settings, launcher)
    return compare_losses(found, alone, ALLOWED[precision])
