"""Runs where TRL is, and knows nothing of ropecli: loads folders by TRL's own code.

    python run_trl.py HOME       HOME/NAME.yaml for each name in HOME/job.json -> HOME/result.json

A result is, by name, tables ({layer type: {inv_freq, attention_factor}}), max_length, and `packing`, the largest
difference between a document's logits alone and in its packed batch.
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


def load(home: Path, name: str) -> dict:
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


if __name__ == "__main__":
    home = Path(sys.argv[1])
    results = {name: load(home, name) for name in json.loads((home / "job.json").read_text())}
    (home / "result.json").write_text(json.dumps(results))
