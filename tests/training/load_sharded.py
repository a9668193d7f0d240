"""load_sharded.py FOLDER whole|unread: two torchrun processes shard a model, and print a digest of its tensors.

whole: each process loads the whole model first. unread: as FSDP2 loads it. Accelerate does not shard on CPUs, so the
loading functions run over torch's fully_shard.
"""

import hashlib
import sys

from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ropecli.attention import load_model
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.training.launch import Launch
from ropecli.training.sharded_weights import build_unread

if __name__ == "__main__":
    folder, way = sys.argv[1:]
    distributed.init_process_group("gloo")
    checkpoint = open_checkpoint(folder, weights=True)
    unread = build_unread(checkpoint, dtype="float32", attn="auto") if way == "unread" else None
    model = unread.model if unread else load_model(checkpoint, dtype="float32", device="cpu")
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for layer in [*model.model.layers, model]:
        fully_shard(layer, mesh=mesh)
    if unread:
        unread.read(Launch(world=2, rank=distributed.get_rank()))
    digest = hashlib.sha256()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        digest.update(f"{name} {tuple(full.shape)} {full.dtype}".encode())
        digest.update(full.detach().contiguous().numpy())
    sys.stdout.write(f"{digest.hexdigest()}\n")  # at once: processes share it
    distributed.destroy_process_group()
