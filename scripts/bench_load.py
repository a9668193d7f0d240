"""Compares the memory of loading a checkpoint for FSDP2 with loading it whole on every process, then sharding it.

    python scripts/bench_load.py            # two gloo processes on this machine, a Llama of 1 GiB in float32
    python scripts/bench_load.py --json

Measured is each process's largest resident set while it loads and shards, minus its resident set before. Accelerate
does not shard on CPUs, so the loading functions run over torch's fully_shard. Linux only.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WAYS = ("whole", "sharded")
_PROCESSES = 2


def write_checkpoint(folder: Path) -> None:
    """A Llama of 269 million parameters in bfloat16, with random weights and tied embeddings."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=14, num_attention_heads=16,
        tie_word_embeddings=True, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def load(folder: Path, way: str) -> Any:
    """Load and shard the model. whole: as every engine but FSDP2 does. Needs a process group."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from ropecli.attention import load_model
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.training.sharded_weights import build_unread

    checkpoint = open_checkpoint(str(folder), weights=True)
    unread = build_unread(checkpoint, dtype="float32", attn="auto") if way == "sharded" else None
    model: Any = unread.model if unread else load_model(checkpoint, dtype="float32", device="cpu")
    mesh = init_device_mesh("cpu", (_PROCESSES,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if unread:
        unread.read()
    return model


def _run_process(folder: Path, way: str) -> None:
    import psutil
    import torch
    from torch import distributed
    from transformers import LlamaForCausalLM  # noqa: F401  (imported before measuring)

    import ropecli.training.finetuning  # noqa: F401
    from ropecli.live.devices import peak_memory, reset_peak

    distributed.init_process_group("gloo")
    tiny = torch.ones(2, 2)
    distributed.all_reduce(tiny)
    before, cpu = psutil.Process().memory_info().rss, torch.device("cpu")
    reset_peak(cpu)
    model = load(folder, way)
    peaks = torch.tensor([peak_memory(cpu) - before])
    distributed.all_reduce(peaks)
    digests: list[Any] = [None] * _PROCESSES
    distributed.all_gather_object(digests, _digest(model))
    if distributed.get_rank() == 0:
        sys.stdout.write(json.dumps({"bytes": int(peaks), "digests": digests}) + "\n")
    distributed.barrier()
    distributed.destroy_process_group()


def _digest(model: Any) -> str:
    """SHA-256 of all full parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        full = getattr(tensor, "full_tensor", lambda tensor=tensor: tensor)()
        digest.update(f"{name} {tuple(full.shape)} {full.dtype}".encode())
        digest.update(full.detach().contiguous().numpy())
    return digest.hexdigest()


def measure(folder: Path, way: str) -> dict[str, Any]:
    """bytes: above the resident memory before loading, over both processes. digests: of each process's tensors."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(_PROCESSES)]
    run = subprocess.run([*launcher, __file__, "--only", str(folder), way], capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(run.stderr)
    return json.loads(run.stdout.splitlines()[-1])


def measure_all() -> dict[str, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as scratch:
        write_checkpoint(Path(scratch))
        return {way: measure(Path(scratch), way) for way in WAYS}


def main() -> None:
    if "--only" in sys.argv:
        _run_process(Path(sys.argv[-2]), sys.argv[-1])
        return
    found = measure_all()
    if "--json" in sys.argv:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return
    for way, one in found.items():
        sys.stdout.write(f"{way:10}{one['bytes'] / 2**20:8,.0f} MiB\n")
    sys.stdout.write(f"ratio {found['sharded']['bytes'] / found['whole']['bytes']:.2f}\n")


if __name__ == "__main__":
    main()
