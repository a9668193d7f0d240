"""Runs in an environment of its own, with transformers 4, and knows nothing of ropecli.

HOME/job.json, the names of folders in HOME -> HOME/result.json: by name, the rotary tables that transformers builds
from the folder's config.json, without weights; or the error that it raises.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
)
from transformers.utils import logging

logging.set_verbosity_error()
BUILDERS = (  # multimodal first: some have a causal LM of the text part as well
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
)


def without_storage(module, name, parameter):
    """Replaces register_parameter: weights take no memory, and buffers stay real."""
    if parameter is not None:
        empty = torch.empty_like(parameter, device="meta")
        parameter = torch.nn.Parameter(empty, requires_grad=False)
    register(module, name, parameter)


def tables(folder: Path) -> dict:
    config = AutoConfig.from_pretrained(folder)
    # the text part of those that only AutoModel builds
    parts = (config, config.get_text_config())
    model = next(
        builder.from_config(part) for part in parts for builder in BUILDERS if type(part) in builder._model_mapping
    )
    by_name = {}
    for name, module in model.named_modules():
        if any(part in name for part in ("vision", "visual", "audio", "codec")):
            continue
        for key, buffer in module.named_buffers(recurse=False):
            if key.endswith("inv_freq") and "original" not in key:
                factor = getattr(module, "attention_scaling", 1.0)
                by_name[f"{name}.{key}"] = {"inv_freq": buffer.double().tolist(), "attention_factor": float(factor)}
    return by_name


def outcome(folder: Path) -> dict:
    try:
        return {"tables": tables(folder)}
    except Exception as error:  # what it says of a config that it cannot read is the result
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    home = Path(sys.argv[1])
    register = torch.nn.Module.register_parameter
    torch.nn.Module.register_parameter = without_storage
    job = json.loads((home / "job.json").read_text())
    (home / "result.json").write_text(json.dumps({name: outcome(home / name) for name in job}))
