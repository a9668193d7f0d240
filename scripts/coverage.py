"""Patches every causal, multimodal and encoder type of the installed transformers and prints which types work.

For each type, a checkpoint with the default configuration is patched with several methods and loaded by stock
transformers, and every rotary table is compared with ropecli's formulas. The models are built on the meta device,
without weights.

    python scripts/coverage.py                  all types, with a summary
    python scripts/coverage.py llama phi3       only these types
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

METHODS = ("yarn", "linear", "ntk", "longrope")
FACTOR = 4.0
_SPARSE = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
}
_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_STEP = {"num_hidden_layers": 2, "sliding_window": 512, "layer_types": ["full_attention", "sliding_attention"]}
_WHOLE = {"rope_type": "default", "rope_theta": 10000.0}
# Settings that a default configuration needs to build a model, or to use RoPE.
SETTINGS: dict[str, dict[str, Any]] = {
    "aya_vision": {"vision_config": {"model_type": "siglip_vision_model"}},
    "bamba": {"attn_layer_indices": [1]},
    "chameleon": {"vocabulary_map": {"<image>": 8711}},
    "cohere_compass": {"text_config": {"rope_parameters": {"full_attention": _WHOLE}}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _WHOLE}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_ocr2": {"text_config": {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]}},
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64}},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "emu3": {"vocabulary_map": {"<image>": 151643}},
    "esm": {"vocab_size": 33, "position_embedding_type": "rotary"},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "gemma4_unified_assistant": {
        "text_config": {
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": 20,
        }
    },
    "glm46v": {"text_config": {"model_type": "glm4v_text", "rope_parameters": _PARTIAL}},
    "glm4_moe": {"head_dim": 128},
    "glm4v": {"text_config": {"rope_parameters": _PARTIAL}},
    "glm4v_moe": {"text_config": {"head_dim": 128}},
    "glmga": {"text_config": {"model_type": "glm4v_text", "rope_parameters": _PARTIAL}},
    "granite4_vision": {"deepstack_layer_map": [[-1, 1]], "downsample_rate": "1/2"},
    "granitemoehybrid": {
        "position_embedding_type": "rope",
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
    },
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "hunyuan_vl": {"text_config": {"head_dim": 128, "rope_parameters": {**_WHOLE, "mrope_section": [16] * 4}}},
    "idefics2": {"text_config": {"model_type": "mistral", "sliding_window": None}},
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
    "ministral": {"head_dim": 128, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
    "mistral": {"sliding_window": None},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp": {"text_config": _SPARSE},
    "qwen4_exp_text": _SPARSE,
    "qwen3_omni_moe_thinker": {"text_config": {"head_dim": 128}},
    "reformer": {"is_decoder": True},
    "step3p5": _STEP,
    "step3p7": {"text_config": _STEP},
    "voxtral_realtime": {"text_config": {"model_type": "voxtral_realtime_text", "sliding_window": None}},
    "zamba2": {"use_mem_rope": True},
}


@dataclass(frozen=True)
class Result:
    """Result of one type and method. tables: number of matching rotary tables. refused: the reason, if refused."""

    model_type: str
    method: str
    tables: int = 0
    refused: str | None = None


def all_types() -> list[str]:
    """Every model_type of a causal, multimodal or masked language model."""
    from ropecli.live.stock_transformers import auto_classes

    return sorted({name for auto_class in auto_classes() for name in auto_class._model_mapping._model_mapping})


def config_of(model_type: str, **settings: Any) -> Any:
    """The type's default configuration, with fixes from SETTINGS."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type](**{**SETTINGS.get(model_type, {}), **settings})


def text_section(config: Any) -> Any:
    """The part with the RoPE fields."""
    return getattr(config, "text_config", None) or config


def write_checkpoint(model_type: str, folder: Path) -> Path:
    """Write a folder with the type's config.json as stock transformers saves it, and unused weights."""
    import numpy as np
    from safetensors.numpy import save_file

    config_of(model_type).save_pretrained(folder)
    save_file({"unused": np.zeros(1, dtype=np.float32)}, folder / "model.safetensors")
    return folder


def patch_all(model_type: str, folder: Path, methods: tuple[str, ...] = METHODS) -> Iterator[Result]:
    """Patch one type with each method, into subfolders of `folder`."""
    from ropecli.attention.patching import patch_to
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.checkpoint.patch_plan import make_plan
    from ropecli.errors import RopecliError

    source = open_checkpoint(write_checkpoint(model_type, folder / "source"))
    for method in methods:
        try:
            plan = make_plan(source, spec_of(method, source))
            yield Result(model_type, method, tables=patch_to(plan, folder / method))
        except RopecliError as error:
            yield Result(model_type, method, refused=str(error))


def spec_of(method: str, checkpoint: Any) -> Any:
    """The method's spec at FACTOR; longrope with factors that increase from pair to pair."""
    from ropecli.checkpoint.state import far_layers
    from ropecli.config.settings import read_settings
    from ropecli.scaling.spec import make_spec

    if method != "longrope":
        return make_spec(method, FACTOR)
    settings = read_settings(checkpoint.config)
    pairs = [rope.geometry.pairs for rope in settings.ropes if rope.geometry.layer_type in far_layers(settings)][:1]
    factors = [1 + 3 * pair / max(1, count - 1) for count in pairs for pair in range(count)]
    return make_spec("longrope", FACTOR, {"long_factor": factors})


def walk(types: list[str], methods: tuple[str, ...] = METHODS) -> Iterator[Result]:
    """Patch all types with all methods."""
    for model_type in types:
        with tempfile.TemporaryDirectory() as folder:
            yield from patch_all(model_type, Path(folder), methods)


def summary(results: list[Result]) -> str:
    """Number of types with RoPE, patched and refused, and number of types without RoPE."""
    refused: dict[str, str] = {}
    worked: set[str] = set()
    for result in results:
        if result.refused is None:
            worked.add(result.model_type)
        else:
            refused.setdefault(result.model_type, result.refused)
    never = {name: reason for name, reason in refused.items() if name not in worked}
    without_rope = {name for name, reason in never.items() if "no rotary position embedding" in reason}
    rotary = len(worked) + len(never) - len(without_rope)
    return (
        f"{len(worked) + len(never)} language-model types, {rotary} with RoPE set by config.json: ropecli patches "
        f"{len(worked)} of them and refuses {rotary - len(worked)}. The other {len(without_rope)} have no such RoPE."
    )


def reading(model_type: str) -> str:
    """How ropecli's reading of the type's default config.json compares with transformers'.

    equal; refused while reading; misread (the proof refuses it); not provable (transformers does not build it).
    """
    from ropecli.config.settings import read_settings
    from ropecli.errors import ProofError, RopecliError
    from ropecli.live.proof import prove_reading

    config = json.loads(config_of(model_type).to_json_string(use_diff=False))
    try:
        read_settings(config)
        tables, _ = prove_reading(config)
    except ProofError:
        return "misread"
    except RopecliError:
        return "refused"
    return "not provable" if tables is None else "equal"


def main() -> None:
    import transformers
    from rich.console import Console
    from rich.table import Table

    types = sys.argv[1:] or all_types()
    results = list(walk(types))
    table = Table(title=f"transformers {transformers.__version__}, factor {FACTOR:g}", title_justify="left")
    for heading in ("type", "reading", *METHODS, "reason for refusal"):
        table.add_column(heading, overflow="fold")
    for model_type in types:
        own = {result.method: result for result in results if result.model_type == model_type}
        reasons = dict.fromkeys(result.refused for result in own.values() if result.refused)
        cells = [str(own[method].tables or "refused") for method in METHODS]
        table.add_row(model_type, reading(model_type), *cells, "; ".join(reasons))
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    console.print(
        "Reading: whether stock transformers builds the tables that ropecli reads from the type's config.json."
    )
    console.print("Numbers: rotary tables of the patched model in stock transformers that match the formulas.")
    console.print(summary(results), markup=False)


if __name__ == "__main__":
    main()
