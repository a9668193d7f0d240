"""The architectures that the methods are proved on, each with its float64 brute force and a float32 model."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

# rotary dimensions of 32: phi3 and glm 16, gpt_neox 8, all others 32
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 32},
    "gemma2": {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 20, "attn_logit_softcapping": 5.0},
    "qwen3": {"head_dim": 32},
    "phi3": {"partial_rotary_factor": 0.5, "original_max_position_embeddings": 64},
    "gpt_neox": {"rotary_pct": 0.25},
    "glm": {"head_dim": 32, "partial_rotary_factor": 0.5},
}


class Subject(NamedTuple):
    """One architecture. folder: its checkpoint. plain, patched: models in float32, of which the second gets patched."""

    name: str
    folder: Path
    plain: Any
    patched: Any
    reference: Any


@pytest.fixture(scope="session", params=ARCHITECTURES)
def subject(request, build) -> Subject:
    import torch
    from reference import Reference
    from transformers import AutoModelForCausalLM

    folder = build(request.param, **ARCHITECTURES[request.param])
    # transformers 5.20's sdpa leaves out soft caps
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    plain, patched = (AutoModelForCausalLM.from_pretrained(folder, **options).eval() for _ in range(2))
    patched.generation_config.eos_token_id = None
    return Subject(request.param, folder, plain, patched, Reference(folder, neighbours=request.param == "glm"))
