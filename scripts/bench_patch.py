"""Benchmarks `ropecli patch` on a checkpoint with the shape of a 7B model against loading and saving that model.

    python scripts/bench_patch.py               # the comparison at 2 and 8 layers, extrapolated to 32
    python scripts/bench_patch.py --layers 32   # the comparison at 32 layers: 14 GB of memory and of disk
    python scripts/bench_patch.py --layers ""   # only the patch

The weights are sparse files of zeros with the headers and sizes of the model. This favours loading and saving, which
then reads nothing from the disk. A patch of a local folder reads all weights once for its digest, which is also
measured alone. Each command runs in a new process; wall time and peak resident memory are the operating system's
counts for it.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

LAYERS, WIDTH, HIDDEN, VOCABULARY, WINDOW = 32, 4096, 11008, 32000, 4096
SHARD = 5 * 10**9
GIB = 2**30
LOAD_AND_SAVE = """
import sys
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
model.config.max_position_embeddings *= 4
model.save_pretrained(sys.argv[2], max_shard_size="5GB")
"""
DIGEST = """
import sys
from ropecli.checkpoint.opening import open_checkpoint
open_checkpoint(sys.argv[1]).digest()
"""


class Cost(NamedTuple):
    """seconds: wall time. memory: peak resident memory, bytes."""

    seconds: float
    memory: float


def tensors(layers: int) -> dict[str, list[int]]:
    """Names and shapes of a Llama's weights."""
    block = {f"self_attn.{name}_proj": [WIDTH, WIDTH] for name in "qkvo"}
    block |= {"mlp.gate_proj": [HIDDEN, WIDTH], "mlp.up_proj": [HIDDEN, WIDTH], "mlp.down_proj": [WIDTH, HIDDEN]}
    block |= {"input_layernorm": [WIDTH], "post_attention_layernorm": [WIDTH]}
    found = {"model.embed_tokens.weight": [VOCABULARY, WIDTH]}
    for layer in range(layers):
        found |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()}
    return found | {"model.norm.weight": [WIDTH], "lm_head.weight": [VOCABULARY, WIDTH]}


def write_checkpoint(folder: Path, layers: int) -> int:
    """Write config.json, bfloat16 shards of zeros and their index; return the bytes of all weights."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": WINDOW,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": WINDOW}))
    shards: list[dict[str, list[int]]] = [{}]
    for name, shape in tensors(layers).items():
        if sum(map(size_of, shards[-1].values())) + size_of(shape) > SHARD:
            shards.append({})
        shards[-1][name] = shape
    names = [f"model-{number + 1:05}-of-{len(shards):05}.safetensors" for number in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        write_shard(folder / name, shard)
    total = sum(size_of(shape) for shard in shards for shape in shard.values())
    where = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def size_of(shape: list[int]) -> int:
    """Bytes in bfloat16."""
    return 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)


def write_shard(path: Path, shapes: dict[str, list[int]]) -> None:
    header, at = {}, 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size_of(shape)]}
        at += size_of(shape)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)


def measure(*arguments: object) -> Cost:
    """Run this Python with `arguments`; child processes are not counted."""
    began = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        redirect = [(os.POSIX_SPAWN_DUP2, said.fileno(), stream) for stream in (1, 2)]
        command = [sys.executable, *map(str, arguments)]
        process = os.posix_spawn(sys.executable, command, os.environ, file_actions=redirect)
        _, status, usage = os.wait4(process, 0)
        seconds = time.perf_counter() - began
        if status:
            said.seek(0)
            sys.exit(f"{' '.join(command[1:4])} failed:\n{said.read().decode(errors='replace')}")
    return Cost(seconds, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024))


def patch(source: Path, output: Path, *options: str) -> Cost:
    cost = measure("-m", "ropecli", "patch", source, "--method", "yarn", "--factor", 4, *options, "-o", output)
    for weights in source.glob("*.safetensors"):
        assert weights.samefile(output / weights.name), "the weights were copied; use a file system with hard links"
    return cost


def median_of(costs: list[Cost]) -> Cost:
    return Cost(statistics.median(cost.seconds for cost in costs), max(cost.memory for cost in costs))


def extrapolate(costs: dict[int, Cost], layers: int) -> Cost:
    """Linear in the number of layers, through the smallest and the largest measurement."""
    few, many = min(costs), max(costs)

    def line(at_few: float, at_many: float) -> float:
        return at_few + (at_many - at_few) * (layers - few) / (many - few)

    return Cost(*map(line, costs[few], costs[many]))


def load_and_save(home: Path, layers: int) -> Cost:
    source, output = home / f"{layers}-layers", home / f"{layers}-layers-saved"
    write_checkpoint(source, layers)
    cost = measure("-c", LOAD_AND_SAVE, source, output)
    for path in output.iterdir():
        path.unlink()
    return cost


def main(
    layers: Annotated[str, typer.Option(help="Numbers of layers to load and save; empty for none.")] = "2,8",
    runs: Annotated[
        int, typer.Option(min=1, help="Number of patches; median time and maximum memory are reported.")
    ] = 5,
    folder: Annotated[Path | None, typer.Option(help="Working folder. Default: the temporary folder.")] = None,
) -> None:
    table = Table(title="one patch of a 7B-shaped checkpoint", title_justify="left")
    for column in ("", "seconds", "peak memory, MiB"):
        table.add_column(column, justify="right" if column else "left")

    def add(label: str, cost: Cost) -> None:
        table.add_row(label, f"{cost.seconds:.2f}", f"{cost.memory / 2**20:,.0f}")

    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory(dir=folder) as name:
        home = Path(name)
        size = write_checkpoint(home / "source", LAYERS)
        shards = len(list((home / "source").glob("*.safetensors")))
        for label, options in {"ropecli patch --no-verify": ["--no-verify"], "ropecli patch": []}.items():
            costs = [patch(home / "source", home / f"{len(options)}-{run}", *options) for run in range(runs)]
            add(label, median_of(costs))
        add("digest", median_of([measure("-c", DIGEST, home / "source") for _ in range(runs)]))
        depths = [int(part) for part in layers.split(",") if part.strip()]
        saved = {depth: load_and_save(home, depth) for depth in depths}
        for depth, cost in saved.items():
            add(f"load and save, {depth} layers", cost)
        if len(saved) > 1 and LAYERS not in saved:
            add(f"load and save, {LAYERS} layers, extrapolated", extrapolate(saved, LAYERS))
    console = Console()
    console.print(f"{LAYERS} layers, {WIDTH} wide, {size / GIB:.1f} GiB in {shards} shards; {runs} patches each")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
