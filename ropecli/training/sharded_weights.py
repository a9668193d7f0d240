"""Reads and writes the weights of a model that FSDP2 shards, without a whole copy on any process.

Each process builds the model without reading weights and lets FSDP2 shard it. Then it reads its own part of the weight
files, tensor by tensor. The result is written file by file, as the source has it. If transformers renames or merges
tensors on loading (experts), the main process reads the model, sends each process its parts, and writes the result
whole.
"""

import shutil
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import distributed
from torch.distributed.checkpoint import HuggingFaceStorageReader, load
from torch.distributed.tensor import DTensor, distribute_tensor

from ropecli.attention import load_model
from ropecli.checkpoint.files import INDEX, WHOLE
from ropecli.checkpoint.opening import Checkpoint
from ropecli.errors import CheckpointError, RopecliError
from ropecli.live.skeleton import build_model
from ropecli.live.stock_transformers import read_stock_config
from ropecli.live.tensors import local_part, named_tensors
from ropecli.training.adapters import trainable
from ropecli.training.launch import Launch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


FileTensor = tuple[Path, str, torch.Tensor]
"""Source file, name and full tensor."""


@dataclass
class UnreadModel:
    """A model whose parameters hold no values yet. files: by tensor; empty if transformers converts the tensors.

    Memory that was never written takes no room, so processes can build it although the host cannot hold it once.
    """

    checkpoint: Checkpoint
    model: "PreTrainedModel"
    files: dict[str, Path] = field(default_factory=dict)

    def read(self, launch: Launch) -> None:
        """Fill this process's part of all tensors. All processes call it, after sharding. Raises CheckpointError."""
        targets = _tensors_of(self.model)
        if not self.files:
            _send_from_main(launch, self.checkpoint, targets)
            return
        state = {name: target.detach() for names, target in targets for name in names if name in self.files}
        with warnings.catch_warnings(action="ignore"):  # about no_dist: the tensors tell each process its part
            load(state, storage_reader=HuggingFaceStorageReader(str(self.checkpoint.folder)), no_dist=True)

    def gathered(self) -> Iterator[FileTensor]:
        """Yield all tensors in the order of the files. All processes exhaust it together."""
        targets = {name: target for names, target in _tensors_of(self.model) for name in names}
        for name, file in sorted(self.files.items(), key=lambda item: (item[1], item[0])):
            yield file, name, _full(targets[name].detach())


def build_unread(checkpoint: Checkpoint, *, dtype: str, attn: str) -> UnreadModel:
    """Build the model of a checkpoint without its weights, on the CPU. Buffers have their values.

    Raises CheckpointError.
    """
    from transformers.initialization import no_init_weights

    paths = checkpoint.weight_files()
    config = read_stock_config(checkpoint.folder, checkpoint.name)
    attention = {} if attn == "auto" else {"attn_implementation": attn}
    with no_init_weights():
        model = build_model(config, "cpu", dtype=getattr(torch, dtype), **attention)
    model.tie_weights()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if any(f".{part}." in f".{name}." for part in model._keep_in_fp32_modules_strict or ()):
            tensor.data = tensor.data.float()
    files = {} if checkpoint.base else _readable_files(model, paths)  # an adapter has to be merged
    return UnreadModel(checkpoint, model.eval(), files)


def _readable_files(model: "PreTrainedModel", paths: Iterable[Path]) -> dict[str, Path]:
    """The file of each tensor, if the files have exactly the model's tensors; otherwise empty."""
    files, shapes = {}, {}
    for path, name, tensor in stored_tensors(paths):
        files[name], shapes[name] = path, tensor.get_shape()
    targets = _tensors_of(model)
    matches = [[name for name in names if shapes.get(name) == list(target.shape)] for names, target in targets]
    exact = all(len(names) == 1 for names in matches) and len(matches) == len(files)
    return files if exact and not is_converted(model) else {}


def stored_tensors(paths: Iterable[Path]) -> Iterator[tuple[Path, str, Any]]:
    """(file, name, tensor) of all tensors in weight files. tensor[...] reads it; get_shape and get_dtype do not."""
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                yield path, name, file.get_slice(name)


def is_converted(model: "PreTrainedModel") -> bool:
    """Return whether transformers computes some of the model's tensors from several in the weight files."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    return any(isinstance(step, WeightConverter) for step in get_model_conversion_mapping(model))


def _tensors_of(model: "PreTrainedModel") -> list[tuple[list[str], torch.Tensor]]:
    """`named_tensors` under their names in the checkpoint, where peft has not inserted those of its wrappers."""
    return [
        ([name.replace(".base_layer.", ".") for name in names], tensor)
        for names, tensor in named_tensors(model)
        if ".lora_" not in names[0]
    ]


def _send_from_main(launch: Launch, checkpoint: Checkpoint, targets: list[tuple[list[str], torch.Tensor]]) -> None:
    """Load the whole model on the main process, and give each process its parts."""
    state: dict[str, torch.Tensor] = {}

    def load() -> str:
        try:
            model = load_model(checkpoint, dtype="float32", device="cpu")
        except RopecliError as error:
            return str(error)
        state.update(model.state_dict())
        loaded = [names for names, _ in named_tensors(model)]
        if untied := next((names for names, _ in targets if len(names) > 1 and names not in loaded), None):
            tied = " and ".join(untied)
            return f"{checkpoint.name}: config.json ties {tied}, but their values differ in the weight files."
        return ""

    if fault := launch.from_main(load):
        raise CheckpointError(fault)
    for names, target in targets:
        part = local_part(target)
        if launch.is_main:
            values = next(state[name] for name in names if name in state).to(part.device)
        else:
            dtype = torch.float32 if target.is_floating_point() else target.dtype
            values = torch.empty(target.shape, dtype=dtype, device=part.device)
        if isinstance(target, DTensor):
            values = local_part(distribute_tensor(values, target.device_mesh, target.placements))
        else:
            distributed.broadcast(values, 0)
        part.copy_(values)


def write_gathered(
    checkpoint: Checkpoint, gathered: Iterable[FileTensor], dtypes: dict[str, torch.dtype], folder: Path
) -> None:
    """Write the tensors into files like the source's, with one file in memory at a time. Raises OSError."""
    name = ""
    for file, tensors in groupby(gathered, key=itemgetter(0)):
        name = file.name
        save_file(
            {key: tensor.to("cpu", dtypes.get(key, tensor.dtype)).contiguous() for _, key, tensor in tensors},
            folder / name,
            metadata={"format": "pt"},
        )
    index = checkpoint.folder / INDEX
    if name != WHOLE and index.is_file():
        shutil.copy(index, folder / index.name)  # the same tensors, dtypes and files


@torch.no_grad()
def all_finite(launch: Launch, model: torch.nn.Module) -> bool:
    """Return whether all trained parameters are finite, on all processes, which call it together."""
    finite = [local_part(parameter).isfinite().all() for _, parameter in trainable(model)]
    return launch.total(~torch.stack(finite).all()) == [0]


def gather_state(launch: Launch, model: "PreTrainedModel", *, only_trained: bool) -> dict[str, torch.Tensor]:
    """The full tensors of a sharded model, on the CPU of the main process. All processes call it together."""
    tensors = trainable(model) if only_trained else model.state_dict().items()
    gathered = ((name, _full(tensor.detach())) for name, tensor in tensors)
    return {name: full.cpu() for name, full in gathered if launch.is_main}


def _full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a sharded tensor. All processes call it together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
