"""The tensors of a model: which names share one, and the part of a sharded one that this process holds."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor


def named_tensors(model: torch.nn.Module) -> list[tuple[list[str], torch.Tensor]]:
    """(names, tensor) of each parameter and each saved buffer; a tied one has several names."""
    named: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        named.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(named.values())


def ties_head(model: Any) -> bool:
    """Return whether the LM head, if there is one, has the weight of the input embeddings."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor, which may be written to."""
    part = tensor.detach()
    return part.to_local() if isinstance(part, DTensor) else part
