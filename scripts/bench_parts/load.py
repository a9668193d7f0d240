"""Loading a checkpoint for FSDP2 against loading it whole on every process, then sharding it. Linux only."""

import hashlib
import tempfile
from pathlib import Path
from typing import Any

from bench import Rows, in_new_process, memory_meter

WAYS = ("whole", "sharded")
_PROCESSES = 2


def load(folder: str, way: str) -> dict[str, Any]:
    """Load and shard the model on each process. whole: as every engine but FSDP2 does.

    Accelerate does not shard on CPUs, so the loading functions run over torch's fully_shard. MiB: peak above the
    resident memory before loading, over all processes. digests: of each process's tensors.
    """
    import torch
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaForCausalLM  # noqa: F401  (imported before measuring)

    import ropecli.training.finetuning  # noqa: F401
    from ropecli.attention import load_model
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.training.sharded_weights import build_unread

    distributed.init_process_group("gloo")
    distributed.all_reduce(torch.ones(2, 2))
    meter = memory_meter()
    checkpoint = open_checkpoint(folder, weights=True)
    unread = build_unread(checkpoint, dtype="float32", attn="auto") if way == "sharded" else None
    model: Any = unread.model if unread else load_model(checkpoint, dtype="float32", device="cpu")
    mesh = init_device_mesh("cpu", (_PROCESSES,))
    for layer in [*model.model.layers, model]:
        fully_shard(layer, mesh=mesh)
    if unread:
        unread.read()
    peaks = torch.tensor([meter()])
    distributed.all_reduce(peaks)
    digest = hashlib.sha256()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        digest.update(f"{name} {tuple(full.shape)} {full.dtype}".encode())
        digest.update(full.detach().contiguous().numpy())
    digests: list[Any] = [None] * _PROCESSES
    distributed.all_gather_object(digests, digest.hexdigest())
    distributed.destroy_process_group()
    return {"MiB": float(peaks), "digests": digests}


def measure(folder: Path, way: str) -> dict[str, Any]:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(_PROCESSES))
    return in_new_process(load, str(folder), way, launcher=launcher)


def run(layers: int = 14) -> Rows:
    """Compare the memory of loading a Llama for FSDP2 by two gloo processes (1 GiB in float32, stored in bfloat16).

    The peaks of the processes while they load and shard, above what they held before, are summed.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=layers, num_attention_heads=16,
        tie_word_embeddings=True, pad_token_id=0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        found = {way: measure(Path(folder), way) for way in WAYS}
    for way, result in found.items():
        equal = {*result["digests"], *found["whole"]["digests"]} == {result["digests"][0]}
        yield "loading on two processes", {"": way, "MiB": result["MiB"], "equal": "yes" if equal else "NO"}
