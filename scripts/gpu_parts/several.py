"""All GPUs of this machine give what one gives: DDP, FSDP2, Ulysses, context parallelism; a model spread over them."""

import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml

import ropecli
from gpu_parts.measuring import Part, compare_losses, losses_of_run
from ropecli.training.recipe_schema import recipe_files

ALLOWED = 1e-3
"""Relative difference of the losses, float32."""
SETTINGS = {"steps": 4, "warmup_steps": 0, "mixed_precision": "none"}


def run(part: Part) -> None:
    count = 2 if part.toy else torch.cuda.device_count()
    if count < 2:
        part.measure("several GPUs", {}, lambda: {"note": "this machine has one GPU"})
        return
    part.measure("device map", {"check": "demo, spread over devices"}, lambda: spread(part))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        ropecli.patch("demo", method="yarn", factor=4, output=folder / "patched")
        alone: dict[bool, list[float]] = {}

        def losses_alone(shared: bool) -> list[float]:
            """One process; with as many passes per step as there would be processes, unless they share a sequence."""
            if shared not in alone:
                gpu = {} if part.toy else {"CUDA_VISIBLE_DEVICES": "0"}
                passes = 1 if shared else count
                settings = {"gradient_accumulation": passes, **SETTINGS}
                alone[shared] = losses_of_run(folder, f"alone-{passes}", settings, environment=gpu)
            return alone[shared]

        for name, launcher, shared in engines(folder, count, part.toy):
            labels = {"engine": name, "processes": count}
            part.measure(
                "several GPUs", labels, lambda n=name, c=launcher, s=shared: compare(folder, n, c, losses_alone(s))
            )


def spread(part: Part) -> dict[str, Any]:
    """Perplexity of the demo over two GPUs (a dry run: over memory and disk) against one device."""
    few = {"data": "demo", "lengths": [256], "max_documents": 2, "dtype": "float32"}
    alone = ropecli.eval_ppl("demo", device=part.device.type, **few)
    found = ropecli.eval_ppl("demo", device_map="auto", max_memory="cpu=8MB" if part.toy else "0=8MB,1=20MB", **few)
    difference = abs(found.cells[0].ppl / alone.cells[0].ppl - 1)
    several = "," in found.device
    return {"devices": found.device, "difference": difference, "allowed": 1e-4, "ok": several and difference <= 1e-4}


def engines(folder: Path, count: int, toy: bool) -> list[tuple[str, list[str], bool]]:
    """(name, launch command, whether the processes share each sequence). A CPU has only DDP."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", f"{count}"]
    found = [("DDP", torchrun, False)]
    if toy:
        return found
    found.append(("FSDP2", launch(folder, "8-gpu-fsdp2", count, {}), False))
    found.append(("context parallelism", launch(folder, "8-gpu-fsdp2", count, {"cp_size": count}), True))
    if find_spec("deepspeed"):
        found.append(("Ulysses", launch(folder, "8-gpu-ulysses", count, {"sp_size": count}), True))
    return found


def launch(folder: Path, name: str, count: int, sizes: dict[str, int]) -> list[str]:
    """`accelerate launch` with one of our configurations, for `count` processes."""
    config = yaml.safe_load(recipe_files("accelerate")[name].text)
    config |= {"num_processes": count, "mixed_precision": "no"}
    if sizes:
        own = {f"parallelism_config_{key}": size for key, size in sizes.items()}
        config["parallelism_config"] = {**config.get("parallelism_config", {}), **own}
        config["use_parallelism_config"] = True
    file = folder / f"{name}{''.join(sizes)}.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    return [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file)]


def compare(folder: Path, name: str, launcher: list[str], alone: list[float]) -> dict[str, Any]:
    settings = {"gradient_accumulation": 1, **SETTINGS}
    found = losses_of_run(folder, name.replace(" ", "-"), settings, launcher)
    return compare_losses(found, alone, ALLOWED)
