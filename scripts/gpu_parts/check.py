"""Checks that the GPU computes what the CPU computes, within stated tolerances."""

import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import ropecli
from gpu_parts.measuring import Part, compare_losses, losses_of_run
from ropecli.attention import block_attention
from ropecli.attention.block_attention import BlockAttention, Rotation
from ropecli.scaling.registry import scaling_methods

FLOAT32 = 5e-4
BFLOAT16 = 0.01
"""Relative differences of perplexity and of training losses that are allowed."""
_HEADS = {torch.float32: 2e-3, torch.bfloat16: 2e-2}
"""Norm of the difference of attention outputs and gradients, relative to the norm of the exact ones."""


def run(part: Part) -> None:
    part.measure("tests", {"check": "tests marked gpu"}, lambda: gpu_tests(part), needs=20)
    perplexity(part)
    for name, method in scaling_methods().items():
        if method.remaps and method.uses_factor:
            for dtype in _HEADS:
                labels = {"method": name, "dtype": str(dtype).removeprefix("torch.")}
                part.measure(
                    "fused attention against blocks in float64",
                    labels,
                    lambda method=method, dtype=dtype: attention(part, method, dtype),
                    needs=5,
                )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        part.measure("fine-tuning", {"check": "demo patched"}, lambda: patch(folder))
        steps = 3 if part.toy else 20
        cpu: list[float] = []
        for precision, allowed in (("none", FLOAT32), ("bf16", BFLOAT16)):
            labels = {"check": f"losses of {steps} steps, {precision}"}
            part.measure("fine-tuning", labels, lambda p=precision, a=allowed: training(folder, steps, p, a, cpu))


def gpu_tests(part: Part) -> dict[str, Any]:
    """A dry run only collects them."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "tests"]
    command += ["--collect-only"] if part.toy else []
    root = Path(__file__).parents[2]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=part.left())
    sys.stderr.write(run.stdout + run.stderr)
    counts = re.search(r"^\d.*", run.stdout.strip().splitlines()[-1]) if run.stdout.strip() else None
    return {"result": counts[0] if counts else "no result", "ok": run.returncode == 0}


def perplexity(part: Part) -> None:
    """The demo's perplexity by device, dtype and attention, against float32 on the CPU."""
    few = {"data": "demo", "lengths": [256, 1024], "max_documents": 2 if part.toy else 8}

    def ppl(**loading: Any) -> list[float]:
        return [
            cell.ppl for cell in ropecli.eval_ppl("demo", methods="yarn", factors=4, **few, **loading).reports[0].cells
        ]

    exact: list[float] = []
    device = part.device.type

    def measured(allowed: float, **loading: Any) -> dict[str, Any]:
        found = ppl(**loading)
        exact.extend(found if not exact else [])
        worst = max(abs(math.log(one / other)) for one, other in zip(found, exact, strict=True))
        ends = dict(zip((f"ppl at {length}" for length in few["lengths"]), found, strict=True))
        return {**ends, "difference": worst, "allowed": allowed, "ok": worst <= allowed}

    rows = [("cpu", "float32", "sdpa", FLOAT32), (device, "float32", "sdpa", FLOAT32)]
    rows += [(device, "bfloat16", attn, BFLOAT16) for attn in ("sdpa", "eager", *fused(part))]
    for where, dtype, attn, allowed in rows:
        labels = {"device": where, "dtype": dtype, "attn": attn}
        part.measure(
            "perplexity of the demo",
            labels,
            lambda a=allowed, w=where, d=dtype, n=attn: measured(a, device=w, dtype=d, attn=n),
        )


def fused(part: Part) -> tuple[str, ...]:
    """Attention that the machine has a fused kernel for."""
    from transformers.utils import is_flash_attn_2_available

    if part.toy:
        return ()
    return ("flex_attention", *(("flash_attention_2",) if is_flash_attn_2_available() else ()))


def attention(part: Part, method: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Output and gradients of the fused kernels against the blocks in float64. On a CPU, blocks in both dtypes."""
    tokens, width = (160, 16) if part.toy else (1024, 64)
    kernel = BlockAttention(
        method.function(tokens // 4, tokens), Rotation(10_000.0 ** -(np.arange(width // 2) / width * 2))
    )
    torch.manual_seed(0)
    heads = [torch.randn(1, count, tokens, width).to(part.device, dtype) for count in (4, 2, 2, 4)]
    exact = attend_and_differentiate(kernel, [one.double() for one in heads])
    with mock.patch.object(block_attention, "attend_by_flex", wraps=block_attention.attend_by_flex) as fused:
        found = attend_and_differentiate(kernel, heads)
    differences = [float((one.double() - other).norm() / other.norm()) for one, other in zip(found, exact, strict=True)]
    allowed = _HEADS[dtype]
    return {
        "forward": differences[0],
        "backward": max(differences[1:]),
        "allowed": allowed,
        "fused": fused.called,
        "ok": max(differences) <= allowed and (fused.called or part.toy),
    }


def attend_and_differentiate(kernel: BlockAttention, heads: list[torch.Tensor]) -> list[torch.Tensor]:
    """The output, and the gradients of query, key and value. heads: these three and the output's gradient."""
    query, key, value = (one.detach().requires_grad_() for one in heads[:3])
    output = kernel(query, key, value, first_query=0, first_key=0, scaling=query.shape[-1] ** -0.5)
    return [output.detach(), *torch.autograd.grad(output, (query, key, value), heads[3])]


def patch(folder: Path) -> dict[str, Any]:
    ropecli.patch("demo", method="yarn", factor=4, output=folder / "patched")
    return {"ok": True}


def training(folder: Path, steps: int, precision: str, allowed: float, cpu: list[float]) -> dict[str, Any]:
    """Losses against float32 on the CPU. cpu: its losses, filled by the first call."""
    settings = {"steps": steps, "warmup_steps": 0, "gradient_accumulation": 1}
    if not cpu:
        without_gpu = {"CUDA_VISIBLE_DEVICES": ""}
        cpu += losses_of_run(folder, "cpu", {**settings, "mixed_precision": "none"}, environment=without_gpu)
    found = losses_of_run(folder, f"gpu-{precision}", {**settings, "mixed_precision": precision})
    return compare_losses(found, cpu, allowed)
