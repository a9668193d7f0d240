"""Training steps of `ropecli finetune` against `transformers.Trainer` with default settings."""

import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from bench import Rows, in_new_process, memory_meter

STEPS = 4
SIZES = ((131_072, 2, 4096), (32_768, 4, 2048), (2_048, 4, 1024))
"""Vocabulary, layers, tokens."""
Meter = Callable[[float], None]


def build(folder: Path, vocabulary: int, layers: int, tokens: int) -> None:
    """Write a checkpoint whose tokens are words, and a text of exactly one sequence."""
    import numpy as np
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=256, intermediate_size=512, num_hidden_layers=layers, num_attention_heads=4,
        max_position_embeddings=tokens, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(vocabulary)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0").save_pretrained(folder)
    ids = np.random.default_rng(0).integers(0, vocabulary, tokens)
    (folder / "text.txt").write_text(" ".join(f"w{index}" for index in ids), encoding="utf-8")


def ours(folder: Path, output: Path, tokens: int, meter: Meter, **keys: Any) -> None:
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.training.finetuning import Listener, run_stages
    from ropecli.training.recipe_schema import make_recipe
    from ropecli.training.stages import plan_stages

    settings = {"steps": STEPS, "length": tokens, "gradient_accumulation": 1, "warmup_steps": 0, "tracker": "none"}
    recipe = make_recipe(None, {"data": str(folder / "text.txt"), "mixed_precision": "none", **settings, **keys})
    run_stages(
        plan_stages(open_checkpoint(str(folder)), recipe),
        output / "ours",
        listener=Listener(on_step=lambda progress: meter(progress.loss)),
    )


def trainer(folder: Path, output: Path, tokens: int, meter: Meter) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments

    class Meters(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **others: Any):
            if logs and "loss" in logs:
                meter(logs["loss"])

    ids = AutoTokenizer.from_pretrained(folder)((folder / "text.txt").read_text(encoding="utf-8"))["input_ids"]
    arguments = TrainingArguments(
        output_dir=str(output),
        per_device_train_batch_size=1,  # the default of 8 would need eight times the logits
        max_steps=STEPS,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    Trainer(model, arguments, train_dataset=[{"input_ids": ids, "labels": ids}] * STEPS, callbacks=[Meters()]).train()


WAYS: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
    "ropecli": (ours, {}),
    "ropecli, checkpointing": (ours, {"gradient_checkpointing": True}),
    "Trainer": (trainer, {}),
}


def measure(way: str, folder: str, tokens: int) -> dict[str, float]:
    """Peak memory of a step above what the process held before the model was loaded; tokens per second; first loss."""
    import accelerate
    import datasets  # noqa: F401
    import transformers  # noqa: F401

    accelerate.Accelerator(cpu=True)
    work, keys = WAYS[way]
    steps: list[tuple[float, float, float]] = []
    memory = memory_meter()

    def meter(loss: float) -> None:
        steps.append((time.process_time(), loss, memory()))

    with tempfile.TemporaryDirectory() as output:
        work(Path(folder), Path(output), tokens, meter, **keys)
    fastest = min(later[0] - earlier[0] for earlier, later in pairwise(steps))
    return {"MiB": steps[-1][2], "tokens/CPU s": tokens / fastest, "loss": steps[0][1]}


def run(sizes: str = "0,1,2", rounds: int = 3) -> Rows:
    """Compare training steps with those of `transformers.Trainer` with default settings.

    Both train the same model on the same sequence, one sequence per step, in float32 on the CPU, at three sizes:
    vocabularies of 131,072, 32,768 and 2,048. CPU time is less affected by other jobs than wall time.
    """
    for vocabulary, layers, tokens in (SIZES[int(number)] for number in sizes.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            build(Path(folder), vocabulary, layers, tokens)
            found = [{way: in_new_process(measure, way, folder, tokens) for way in WAYS} for _ in range(rounds)]
        best = {key: {way: max(one[way][key] for one in found) for way in WAYS} for key in found[0]["Trainer"]}
        best["MiB"] = {way: min(one[way]["MiB"] for one in found) for way in WAYS}
        for way in WAYS:
            row = {"": way, **{key: values[way] for key, values in best.items()}}
            ratios = {f"{key} vs Trainer": row[key] / best[key]["Trainer"] for key in ("MiB", "tokens/CPU s")}
            yield f"vocabulary {vocabulary:,}, {layers} layers, {tokens:,} tokens", row | ratios
