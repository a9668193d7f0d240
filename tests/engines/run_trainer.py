"""Runs where a trainer is, and knows nothing of ropecli: loads folders by the trainer's own code.

    python run_trainer.py trl|axolotl|... HOME       HOME/NAME.yaml for each name in HOME/job.json -> HOME/result.json

A result is, by name, tables ({layer type: {inv_freq, attention_factor}}) and max_length; of TRL also `packing`, the
largest difference between a document's logits alone and in its packed batch.
"""

import json
import sys
from itertools import pairwise
from pathlib import Path

import torch


def tables(model) -> dict:
    results = {}
    for module in model.modules():
        for key, buffer in module.named_buffers(recurse=False):
            if key.endswith("inv_freq") and "original" not in key:
                layer_type = key.removesuffix("inv_freq")
                factor = getattr(module, f"{layer_type}attention_scaling", getattr(module, "attention_scaling", 1.0))
                results[layer_type.rstrip("_")] = {"inv_freq": buffer.double().tolist(), "attention_factor": factor}
    return results


class LoadedError(Exception):
    """Raised where TRL's script would begin to train."""


def by_trl(home: Path, name: str) -> dict:
    import trl
    from trl.scripts import sft

    def train(trainer, **_):
        raise LoadedError(trainer)

    trl.SFTTrainer.train = train
    words = ["--config", str(home / f"{name}.yaml"), "--dataset_name", str(home / "texts"), "--use_cpu", "true"]
    words += ["--attn_implementation", "sdpa", "--output_dir", str(home / "out"), "--report_to", "none"]
    try:
        sft.main(*sft.make_parser().parse_args_and_config([*words, "--bf16", "false"]))
    except LoadedError as loaded:
        trainer = loaded.args[0]
        return {"tables": tables(trainer.model), "packing": leak(trainer), "max_length": trainer.args.max_length}


def leak(trainer) -> float:
    """Largest difference between a packed document's logits and those of the document alone."""
    batch = next(iter(trainer.get_train_dataloader()))
    batch.pop("labels")
    starts = batch["cu_seq_lens_q"].tolist()
    assert len(starts) > 2, "the batch holds one document"
    model = trainer.model.eval()
    with torch.no_grad():
        packed = model(**batch, use_cache=False).logits[0]
        alone = [model(batch["input_ids"][:, a:b], use_cache=False).logits[0] for a, b in pairwise(starts)]
    return float((packed - torch.cat(alone)).abs().max())


def by_axolotl(home: Path, name: str) -> dict:
    from axolotl.cli.config import load_cfg
    from axolotl.loaders import ModelLoader, load_tokenizer

    cfg = load_cfg(str(home / f"{name}.yaml"), attn_implementation="sdpa", bf16=False, output_dir=str(home / "out"))
    model, _ = ModelLoader(cfg, load_tokenizer(cfg)).load()
    return {"tables": tables(model), "max_length": cfg.sequence_len}


def by_llama_factory(home: Path, name: str) -> dict:
    import yaml
    from llamafactory.hparams import get_train_args
    from llamafactory.model import load_model, load_tokenizer

    written = yaml.safe_load((home / f"{name}.yaml").read_text())
    here = {"flash_attn": "sdpa", "bf16": False, "output_dir": str(home / "out"), "report_to": "none"}
    model_args, data_args, _, finetuning_args, _ = get_train_args({**written, **here})
    model = load_model(load_tokenizer(model_args)["tokenizer"], model_args, finetuning_args, is_trainable=True)
    return {"tables": tables(model), "max_length": data_args.cutoff_len}


def by_ms_swift(home: Path, name: str) -> dict:
    from swift.arguments import PretrainArguments
    from swift.cli.main import parse_yaml_args
    from swift.utils import parse_args

    model_type = name.partition("-")[0].replace("phi", "phi2")  # several types share an architecture
    words = [str(home / f"{name}.yaml"), "--attn_impl", "sdpa", "--packing", "false", "--torch_dtype", "float32"]
    words += [
        "--model_type",
        model_type,
        "--template",
        "default",
        "--output_dir",
        str(home / "out"),
        "--report_to",
        "none",
    ]
    parse_yaml_args(words)
    args, unknown = parse_args(PretrainArguments, words)
    assert not unknown, unknown
    return {"tables": tables(args.get_model_processor()[0]), "max_length": args.max_length}


def by_unsloth(home: Path, name: str) -> dict:
    """Its own class for GPUs takes the frequencies and the attention factor from `_compute_config_rope_inv_freq`."""
    from unsloth import FastLanguageModel  # before transformers, which it patches
    from unsloth.models import llama
    from unsloth_cli.config import load_config

    cfg = load_config(home / f"{name}.yaml")
    model, _ = FastLanguageModel.from_pretrained(
        cfg.model,
        max_seq_length=cfg.training.max_seq_length,
        load_in_4bit=cfg.training.load_in_4bit,
        full_finetuning=cfg.training.training_type == "full",
        dtype=torch.float32,
    )
    results = tables(model)
    if "" in results:
        inv_freq, factor = llama._compute_config_rope_inv_freq(model.config, model.config.rope_parameters)
        assert results[""] == {"inv_freq": inv_freq.double().tolist(), "attention_factor": factor}
    return {"tables": results, "max_length": cfg.training.max_seq_length}


if __name__ == "__main__":
    trainer, home = sys.argv[1], Path(sys.argv[2])
    load = globals()[f"by_{trainer.replace('-', '_')}"]
    results = {name: load(home, name) for name in json.loads((home / "job.json").read_text())}
    (home / "result.json").write_text(json.dumps(results))
