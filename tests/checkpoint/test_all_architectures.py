"""Every causal-LM type of transformers: patched, or refused with a reason, and never left as it was in silence.

Each type's default configuration is patched with four methods. What was written is then built by stock transformers
alone: not ropecli's proof but this file finds the rotary tables, and holds them against the plan's mathematics.
"""

import importlib.metadata
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from ropecli.checkpoint.plan import PatchPlan, effective_ropes, make_plan
from ropecli.checkpoint.reading import open_checkpoint
from ropecli.checkpoint.writing import patch_to
from ropecli.errors import RopecliError
from ropecli.rope import ScaledRope

PINNED = "5.23.0"
pytestmark = pytest.mark.skipif(
    importlib.metadata.version("transformers") != PINNED,
    reason=f"other releases than transformers {PINNED} know other types",
)

# What the README says; the lists below must add up to it.
TYPES, WORKS, REFUSES = 189, 124, 6

NO_POSITIONS = set(
    """bart bert bert-generation big_bird bigbird_pegasus biogpt blenderbot blenderbot-small bloom camembert codegen
    cpmant ctrl data2vec-text electra ernie falcon_mamba git gpt-sw3 gpt2 gpt_bigcode gpt_neo gptj inkling2_text
    inkling_text jamba kimi_linear mamba mamba2 marian mbart megatron-bert mpt musicgen musicgen_melody mvp nemotron_h
    openai-gpt opt pegasus plbart prophetnet reformer rembert roberta roberta-prelayernorm roc_bert roformer rwkv trocr
    whisper xglm xlm xlm-roberta xlm-roberta-xl xlnet xlstm xmod zamba""".split()
)
LONGROPE_OF_MIXED_LAYERS = "transformers refuse longrope where layers differ in head_dim"
NO_MODEL_ALONE = "transformers does not build a model from this config: The set of layer types producing a cache"
# type -> method -> part of the message; a method that is not named works.
REFUSED: dict[str, dict[str, str]] = {
    "beam": dict.fromkeys(("yarn", "linear", "ntk", "longrope"), "no layer that sees the whole context has rotary"),
    "blt": dict.fromkeys(("yarn", "linear", "ntk", "longrope"), "holds the configs of several transformers"),
    "dots3_note": {"longrope": LONGROPE_OF_MIXED_LAYERS},
    "dots3_note_text": {"longrope": LONGROPE_OF_MIXED_LAYERS},
    "gemma3n": dict.fromkeys(("yarn", "linear", "ntk", "longrope"), "requires the timm library"),
    "recurrent_gemma": dict.fromkeys(("yarn", "linear", "ntk", "longrope"), "looks back attention_window_size tokens"),
    **{
        name: dict.fromkeys(("yarn", "longrope"), LONGROPE_OF_MIXED_LAYERS)
        for name in ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
    },
    **{
        name: {**dict.fromkeys(("yarn", "longrope"), LONGROPE_OF_MIXED_LAYERS), "linear": NO_MODEL_ALONE, "ntk": NO_MODEL_ALONE}
        for name in ("gemma4_assistant", "gemma4_unified_assistant")
    },
}


def _coverage() -> Any:
    path = Path(__file__).parents[2] / "scripts" / "coverage.py"
    spec = importlib.util.spec_from_file_location("ropecli_coverage", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
