"""`ropecli patch` on a checkpoint with the shape of a 7B model."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import MIB, Rows, in_new_process

LAYERS = 32
DIGEST = """
import sys
from ropecli.checkpoint.opening import open_checkpoint
open_checkpoint(sys.argv[1]).digest()
"""
Cost = tuple[float, float]
"""Wall time, seconds; peak resident memory, MiB."""


def write_checkpoint(folder: str, layers: int, width: int) -> None:
    """Write config.json, and bfloat16 shards of zeros as sparse files."""
    import torch
    from huggingface_hub import split_torch_state_dict_into_shards
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=width, intermediate_size=width * 43 // 16, num_hidden_layers=layers, max_position_embeddings=4096
    )
    with torch.device("meta"):
        state = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).state_dict()
    config.architectures, config.dtype = ["LlamaForCausalLM"], "bfloat16"
    config.save_pretrained(folder)
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 4096}))
    split = split_torch_state_dict_into_shards(state, max_shard_size="5GB")
    for file, names in split.filename_to_tensors.items():
        header, at = {}, 0
        for name in names:
            end = at + 2 * state[name].numel()
            header[name] = {"dtype": "BF16", "shape": list(state[name].shape), "data_offsets": [at, end]}
            at = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (Path(folder) / file).open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + at)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (Path(folder) / "model.safetensors.index.json").write_text(json.dumps(index))


def cost_of(*arguments: object) -> Cost:
    """Wall time and peak memory of this Python with `arguments`, without its child processes."""
    begun = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen([sys.executable, *map(str, arguments)], stdout=said, stderr=said)
        _, status, usage = os.wait4(process.pid, 0)
        seconds, process.returncode = time.perf_counter() - begun, status
        if status:
            said.seek(0)
            raise SystemExit(said.read().decode(errors="replace"))
    return seconds, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / MIB


def patch(source: Path, output: Path, *options: str) -> Cost:
    cost = cost_of("-m", "ropecli", "patch", source, "--method", "yarn", "--factor", 4, *options, "-o", output)
    for weights in source.glob("*.safetensors"):
        assert weights.samefile(output / weights.name), "the weights were copied; use a file system with hard links"
    return cost


def run(runs: int = 5, width: int = 4096, folder: Path | None = None) -> Rows:
    """Measure `ropecli patch` on a checkpoint of 32 layers: median time and maximum memory of --runs runs.

    The weights are sparse files of zeros. A patch of a local folder reads all weights once for its digest, which is
    also measured alone. --folder: for the checkpoint (default: the temporary folder).
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory(dir=folder) as name:
        home = Path(name)
        source = home / "source"
        in_new_process(write_checkpoint, str(source), LAYERS, width)
        shards = list(source.glob("*.safetensors"))
        gib = sum(shard.stat().st_size for shard in shards) / 2**30
        title = f"patch of {LAYERS} layers, {width} wide, {gib:.1f} GiB in {len(shards)} shards"
        for label, work in {
            "ropecli patch --no-verify": lambda number: patch(source, home / f"unproved-{number}", "--no-verify"),
            "ropecli patch": lambda number: patch(source, home / f"proved-{number}"),
            "digest": lambda number: cost_of("-c", DIGEST, source),
        }.items():
            seconds, mib = zip(*map(work, range(runs)), strict=True)
            yield title, {"": label, "seconds": statistics.median(seconds), "MiB": max(mib)}
