"""Trains the demo checkpoint from scratch: tokenizer, weights, model card.

    python scripts/train_demo.py                    # writes runs/demo, then copies to ropecli/demo
    python scripts/train_demo.py --tokens 1000000 --work runs/trial --no-install

The same command resumes an interrupted run from its last training checkpoint. The batch of a step depends only on
(seed, step), so a resumed run sees the same batches as an uninterrupted one.
"""

import json
import math
import platform
import shutil
import time
from pathlib import Path

import numpy as np
import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from ropecli import open_checkpoint
from ropecli.attention import load_model
from ropecli.data.documents import read_documents
from ropecli.demo import FOLDER
from ropecli.demo.corpus import HELD_OUT, held_out_files, line_windows, sample_windows, training_files
from ropecli.evaluation.driver import score_samples
from ropecli.evaluation.readers.live import LiveReader
from ropecli.evaluation.tasks.perplexity import Perplexity
from ropecli.live.loading import load_tokenizer

WINDOW = 256
VOCABULARY = 2048
END_OF_TEXT = "<|endoftext|>"
CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": WINDOW,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
INSTALLED = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "trained_windows.npy",
    "README.md",
)
CARD = """---
library_name: transformers
license: mit
tags: [code, rope, long-context]
---
# The demo checkpoint of ropecli

A Llama with {parameters:.1f} million parameters (4 layers, width 256, 8 heads of 32 sharing 2 key-value heads,
byte-level BPE of 2048, tied embeddings, rope_theta 10000), trained from scratch with a pretraining length of
**256 tokens**. Its purpose is to be extended: it fails beyond 256 tokens, and ropecli fixes that. It is too small for
anything else.

- Data: the source code of Python {python}'s standard library, {files} files, {megabytes:.1f} MB, {million:.2f}
  million tokens, without the {held_out} held-out files listed in `corpus.py` and without files that share eight
  consecutive lines with one of them.
- Training: {steps} steps of {batch} random sequences of 256 tokens, {seen:.1f} million tokens in total; Muon for the
  hidden matrices and AdamW for the rest, peak learning rate {lr:g}, linear warmup over 2% and decay over the last 40%,
  bf16 autocast; seed {seed}; {minutes:.0f} minutes on {device}.
- Reproduce: `python scripts/train_demo.py`

Perplexity on the held-out files ({held_out} documents, float32) by context length:

| protocol | {header} |
| --- | {rule} |
{table}

`prefix` scores the first N tokens of each document; `tail` scores the same 128 tokens per document (the last of its
first 2048) with a context length of N.
"""


def train_tokenizer(
    texts: list[str], folder: Path, vocabulary: int = VOCABULARY, window: int = WINDOW
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE. Documents start with END_OF_TEXT, like Llama's with <s>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", pair=f"{END_OF_TEXT} $A {END_OF_TEXT} $B", special_tokens=[(END_OF_TEXT, 0)]
    )
    special = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=window, clean_up_tokenization_spaces=False, **special
    )
    fast.save_pretrained(folder)
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # the class name known to transformers 4 and 5
    config_file.write_text(json.dumps(config, indent=2) + "\n")
    return fast


def prepare_corpus(work: Path) -> np.ndarray:
    """Token ids of the training data as one array; writes the tokenizer and the hashes next to it."""
    stream = work / "stream.npy"
    if stream.exists():
        return np.load(stream, mmap_mode="r")
    files = list(training_files())
    texts = [text for _, text in files]
    tokenizer = train_tokenizer(texts, work)
    windows = set().union(*(line_windows(text) for text in texts))
    np.save(work / "trained_windows.npy", sample_windows(windows))
    ids = np.concatenate([np.array(ids, dtype=np.uint16) for ids in tokenizer(texts)["input_ids"]])
    size = sum(len(text.encode()) for text in texts)
    (work / "corpus.json").write_text(json.dumps({"files": len(files), "bytes": size, "tokens": len(ids)}))
    np.save(work / "stream.tmp.npy", ids)
    (work / "stream.tmp.npy").replace(stream)
    return ids


def batch_at(stream: np.ndarray, seed: int, step: int, size: int, device: str, window: int = WINDOW) -> torch.Tensor:
    starts = np.random.default_rng([seed, step]).integers(0, len(stream) - window - 1, size=size)
    rows = np.stack([stream[start : start + window + 1] for start in starts]).astype(np.int64)
    return torch.from_numpy(rows).to(device)


def make_optimizers(model: torch.nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices, AdamW for embeddings and norms: fewer tokens to the same loss."""
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    other = [p for name, p in model.named_parameters() if not (p.ndim == 2 and "embed" not in name)]
    return [
        torch.optim.Muon(hidden, lr=lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(other, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def schedule(step: int, steps: int) -> float:
    """Learning-rate factor: warmup over 2%, constant, linear to zero over the last 40%."""
    return min(1.0, (step + 1) / max(1, steps // 50), (steps - step) / (0.4 * steps))


def save_state(path: Path, state: dict) -> None:
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def pretrain(stream: np.ndarray, work: Path, *, tokens: int, batch: int, lr: float, seed: int) -> dict:
    """Train on `tokens` tokens; return the last state, with the model as a float32 state dict."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG)).to(device)
    optimizers = make_optimizers(model, lr)
    steps = math.ceil(tokens / (batch * WINDOW))
    state_file = work / "state.pt"
    state = {"step": 0, "seconds": 0.0, "device": device}
    if state_file.exists():
        state = torch.load(state_file, map_location=device)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress, (work / "metrics.jsonl").open("a") as log:
        bar = progress.add_task("pretraining", total=steps, completed=state["step"])
        begun, before = time.monotonic(), state["seconds"]
        for step in range(state["step"], steps):
            loss = update(model, optimizers, batch_at(stream, seed, step, batch, device), lr * schedule(step, steps))
            seconds = before + time.monotonic() - begun
            if step % 20 == 0:
                log.write(json.dumps({"step": step, "loss": round(loss, 4), "seconds": round(seconds)}) + "\n")
                log.flush()
            progress.update(bar, advance=1, description=f"pretraining, loss {loss:.3f}")
            if (step + 1) % 200 == 0 or step + 1 == steps:
                state = {"step": step + 1, "seconds": seconds, "device": device, "model": model.state_dict()}
                state["optimizers"] = [optimizer.state_dict() for optimizer in optimizers]
                save_state(state_file, state)
    return state


def update(model: torch.nn.Module, optimizers: list, rows: torch.Tensor, lr: float) -> float:
    """One step on rows of shape (batch, WINDOW + 1). Returns the loss, nats per token."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
    with torch.autocast(rows.device.type, dtype=torch.bfloat16):
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def export(state: dict, work: Path) -> Path:
    """Write the model as a checkpoint folder: bf16 weights, and a config for transformers 4 and 5."""
    folder = work / "export"
    model = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG))
    model.load_state_dict(state["model"])
    model.to(torch.bfloat16).save_pretrained(folder)
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text())
    config |= {"rope_theta": config["rope_parameters"]["rope_theta"], "rope_scaling": None, "torch_dtype": "bfloat16"}
    config_file.write_text(json.dumps(config, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json", "trained_windows.npy"):
        shutil.copyfile(work / name, folder / name)
    return folder


def measure(folder: Path) -> dict[str, dict[int, float]]:
    """Perplexity on the held-out files, by protocol and length."""
    checkpoint = open_checkpoint(folder)
    model = load_model(checkpoint, device="cpu")
    documents = read_documents(held_out_files().items(), load_tokenizer(checkpoint), 16 * WINDOW)
    lengths = [WINDOW * 2**power for power in range(4)]
    results = {}
    for protocol in ("prefix", "tail"):
        task = Perplexity(documents, lengths, protocol)
        results[protocol] = {cell.length: cell.ppl for cell in task.cells(score_samples(task, LiveReader(model)))}
    return results


def write_card(folder: Path, work: Path, state: dict, asked: dict) -> None:
    results = measure(folder)
    corpus = json.loads((work / "corpus.json").read_text())
    lines = [
        f"| {protocol} | {' | '.join(f'{ppl:.2f}' for ppl in row.values())} |" for protocol, row in results.items()
    ]
    lengths = list(results["prefix"])
    card = CARD.format(
        **asked,
        **corpus,
        megabytes=corpus["bytes"] / 1e6,
        million=corpus["tokens"] / 1e6,
        seen=state["step"] * asked["batch"] * WINDOW / 1e6,
        steps=state["step"],
        minutes=state["seconds"] / 60,
        device={"cpu": "shared CPU cores", "cuda": "one GPU"}[state.get("device", "cpu")],
        parameters=sum(value.numel() for key, value in state["model"].items() if key != "lm_head.weight") / 1e6,
        python=platform.python_version(),
        held_out=len(HELD_OUT),
        header=" | ".join(map(str, lengths)),
        rule=" | ".join("---:" for _ in lengths),
        table="\n".join(lines),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def main(
    tokens: int = 26_000_000,
    batch: int = 32,
    lr: float = 6e-3,
    seed: int = 0,
    work: Path = Path("runs/demo"),
    install: bool = True,
) -> None:
    """Train the demo checkpoint, write its model card, and copy both to ropecli/demo."""
    work.mkdir(parents=True, exist_ok=True)
    stream = prepare_corpus(work)
    state = pretrain(stream, work, tokens=tokens, batch=batch, lr=lr, seed=seed)
    folder = export(state, work)
    write_card(folder, work, state, {"batch": batch, "lr": lr, "seed": seed})
    if install:
        for name in INSTALLED:
            shutil.copyfile(folder / name, FOLDER / name)
    print(f"{folder / 'README.md'}\n{(folder / 'README.md').read_text()}")


if __name__ == "__main__":
    typer.run(main)
