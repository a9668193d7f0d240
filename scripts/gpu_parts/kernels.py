"""Kernels that `finetune` does not use yet, and MLPs in tiles: the same step with and without each."""

import os
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import ropecli
from gpu_parts.measuring import Part
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.checkpoint.state import read_state
from ropecli.live.devices import peak_memory, reset_peak
from ropecli.live.proof import prove
from ropecli.training.loss import NextTokenLoss
from ropecli.training.tiled_mlp import tile_mlps

BFLOAT16, FLOAT8 = 0.02, 0.1
"""Relative differences of loss and gradient norm that are allowed."""
OPT_IN = "HUB_KERNELS"
"""Environment variable that lets the part run code from the Hub."""


def with_liger(model: Any) -> None:
    """Replaces the rotary function, norms and MLPs."""
    from transformers.integrations.liger import apply_liger_kernel

    apply_liger_kernel(model, {"fused_linear_cross_entropy": False})


def with_float8(model: Any) -> None:
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(model, module_filter_fn=lambda module, name: "lm_head" not in name)


def from_hub(model: Any) -> None:
    model.set_use_kernels(True)


WAYS: dict[str, tuple[str, Callable[[Any], None], float]] = {
    "plain": ("", lambda model: None, 0.0),
    "tiled MLP": ("", tile_mlps, BFLOAT16),
    "torchao float8": ("torchao", with_float8, FLOAT8),
    "kernels from the Hub": ("kernels", from_hub, BFLOAT16),
    "Liger": ("liger_kernel", with_liger, BFLOAT16),  # the last, since it replaces functions of transformers' modules
}
"""Package that it needs, change of a model, allowed difference."""


def run(part: Part) -> None:
    plain: dict[str, Any] = {}
    for way, (package, change, allowed) in WAYS.items():
        missing = why_not(part, package)

        work = partial(step, part, change, allowed, plain) if not missing else partial(dict, {"not tried": missing})
        found = part.measure("a step by other kernels", {"way": way}, work, needs=0 if part.toy else 20)
        plain = plain or found
    missing = why_not(part, "liger_kernel")
    part.measure(
        "rotary tables",
        {"way": "Liger"},
        lambda: {"not tried": missing} if missing else {"proved": proved(), "ok": True},
    )


def why_not(part: Part, package: str) -> str:
    """Why a way cannot be tried here, or ''."""
    if package and part.toy:
        return "needs a GPU"
    if package and not find_spec(package):
        return f"{package} is not installed"
    return f"set {OPT_IN}=1 to run code from the Hub" if package == "kernels" and not os.environ.get(OPT_IN) else ""


def step(part: Part, change: Callable[[Any], None], allowed: float, plain: dict[str, Any]) -> dict[str, Any]:
    """A forward and backward pass, and how far it is from the plain one."""
    model: Any = part.llama(layers=4).train()
    change(model)
    tokens = 256 if part.toy else 16_384
    numbers = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, tokens + 1), generator=numbers).to(part.device)
    loss_of = NextTokenLoss(model)

    def once() -> float:
        model.zero_grad()
        loss = loss_of(ids[:, :-1], ids[:, 1:]) / tokens
        loss.backward()
        return loss.item()

    loss = once()  # compiles
    norm = sum(weight.grad.float().square().sum().item() for weight in model.parameters()) ** 0.5
    reset_peak(part.device)
    seconds = part.seconds_of(once, rounds=3)
    difference = max(abs(loss / plain["loss"] - 1), abs(norm / plain["norm"] - 1)) if plain else 0.0
    return {
        "loss": loss,
        "norm": norm,
        "difference": difference,
        "ok": difference <= allowed,
        "seconds": seconds,
        "peak_bytes": peak_memory(part.device),
    }


def proved() -> int:
    """Number of rotary tables that match our formulas while the rotary function of transformers is replaced."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "patched"
        ropecli.patch("demo", method="yarn", factor=4, output=folder)
        return prove(folder, read_state(open_checkpoint(folder)).positions.ropes)
