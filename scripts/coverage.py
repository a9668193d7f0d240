"""Patches every causal, multimodal and encoder type of the installed transformers and prints which types work.

For each type, a checkpoint with the default configuration is patched with several methods and loaded by stock
transformers, and every rotary table is compared with ropecli's formulas. The models are built on the meta device,
without weights.

    python scripts/coverage.py                  all types, with a summary
    python scripts/coverage.py llama phi3       only these types
    python scripts/coverage.py --layers         what config.json says of each layer, against a small model that is run
    python scripts/coverage.py --reading        each rope_type in both dialects, as ropecli and as transformers read it
"""

import copy
import multiprocessing
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

METHODS = ("yarn", "linear", "ntk", "longrope")
FACTOR = 4.0
_CHOOSES = {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
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
_NARROW = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
# Settings with which a small model of the narrow type can be run.
NARROW: dict[str, dict[str, Any]] = {
    "deepseek_v2": _CHOOSES,
    "deepseek_v4": {
        **dict.fromkeys(("head_dim", "q_lora_rank", "o_lora_rank", "index_head_dim"), 32),
        **{"o_groups": 2, "index_n_heads": 2, "num_key_value_heads": 1, "partial_rotary_factor": 0.5},
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
    "dots1": _CHOOSES,
}
_SECONDS = 60
"""CPU time for a small model of one type."""
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


_FACTOR = {"factor": 4.0, "original_max_position_embeddings": 1024}
_BASE = 54321.0
# Scalings that config.json may have: what transformers documents, and what only some types read.
SCALINGS: dict[str, dict[str, Any]] = {
    "base": {"rope_type": "default", "rope_theta": _BASE},
    "rotary share": {"rope_type": "default", "partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "factor": 4.0, "attention_factor": 1.3},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "alpha": {"rope_type": "dynamic", "factor": 1.0, "alpha": 100.0},
    "yarn": {"rope_type": "yarn", **_FACTOR},
    "yarn, no length": {"rope_type": "yarn", "factor": 4.0},
    "yarn, no factor": {"rope_type": "yarn", "original_max_position_embeddings": 1024},
    "yarn, ramp": {"rope_type": "yarn", **_FACTOR, "truncate": False, "beta_fast": 20.0, "beta_slow": 2.0},
    "yarn, mscale": {"rope_type": "yarn", **_FACTOR, "mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn, half mscale": {"rope_type": "yarn", **_FACTOR, "mscale": 2.0},
    "llama3": {"rope_type": "llama3", **_FACTOR, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"rope_type": "longrope", **_FACTOR},
    "longrope, mscales": {"rope_type": "longrope", **_FACTOR, "short_mscale": 1.2, "long_mscale": 1.2},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
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


def reading_of(config: dict[str, Any]) -> tuple[str, str]:
    """How ropecli's reading of a config.json compares with transformers', and why.

    equal; repaired (transformers ignores a field, and a warning says so); refused while reading; misread (the proof
    refuses it); not provable (transformers does not build it).
    """
    import numpy as np

    from ropecli.config.settings import read_settings
    from ropecli.errors import ProofError, RopecliError
    from ropecli.live.proof import prove_reading
    from ropecli.scaling.scale import scale

    try:
        settings = [read_settings(config, stock=stock) for stock in (False, True)]
        ours, theirs = ([scale(rope.geometry, rope.spec) for rope in setting.ropes] for setting in settings)
    except RopecliError as error:
        return "refused", str(error)
    try:
        tables, why_not = prove_reading(config)
    except ProofError as error:
        return "misread", str(error)
    if tables is None:
        return "not provable", why_not
    same = all(
        np.array_equal(first.inv_freq, second.inv_freq) and first.attention_factor == second.attention_factor
        for first, second in zip(ours, theirs, strict=True)
    )
    return ("equal", "") if same else ("repaired", "; ".join(finding.message for finding in settings[0].findings))


def scaled_configs(model_type: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The default config.json of a type, and with each of SCALINGS in both dialects, by name."""
    import json

    from ropecli.config.fields import section_of
    from ropecli.config.settings import read_settings

    default = json.loads(config_of(model_type).to_json_string(use_diff=False))
    yield "default", default
    settings = read_settings(default)
    far = [rope.geometry for rope in settings.ropes if rope.far] or [settings.ropes[0].geometry]
    for name, scaling in SCALINGS.items():
        parameters = {"rope_theta": _BASE, **scaling}
        if scaling["rope_type"] == "longrope":
            rising = [1 + pair / 10 for pair in range(far[0].pairs)]
            parameters |= {"short_factor": [1.0] * len(rising), "long_factor": rising}
        for older in (False, True):
            config = copy.deepcopy(default)
            section = section_of(config)
            before = section.pop("rope_parameters", None) or {}
            if older:
                parameters = {key: value for key, value in parameters.items() if key != "rope_theta"}
                section |= {"rope_theta": _BASE, "rope_scaling": {**parameters, "type": scaling["rope_type"]}}
                if scaling["rope_type"] == "default":
                    section["rope_scaling"] = None
                    section |= {key: scaling[key] for key in scaling.keys() & {"partial_rotary_factor"}}
            elif far[0].layer_type is None:
                section["rope_parameters"] = {**before, **parameters}
            else:
                section["rope_parameters"] = before | {
                    rope.layer_type: {**before[rope.layer_type], **parameters} for rope in far
                }
            yield f"{name}, {'older' if older else 'newer'} fields", config


def compare_reading(types: list[str]) -> int:
    """Print where ropecli reads the RoPE fields of a type in another way than transformers. Returns the crashes."""
    from ropecli.errors import RopecliError

    totals: Counter[str] = Counter()
    for model_type in types:
        counts: Counter[str] = Counter()
        try:
            for name, config in scaled_configs(model_type):
                outcome, reason = reading_of(config)
                counts[outcome] += 1
                if outcome in ("misread", "repaired") or name == "default" != outcome == "not provable":
                    print(f"  {outcome}: {model_type}, {name}: {reason.partition('base. ')[2] or reason}")
        except RopecliError as error:
            counts["refused"] += 1
            print(f"  refused: {model_type}, default: {error}")
        except Exception as error:  # a type that transformers itself cannot build, or a fault of ours
            counts["failed"] += 1
            print(f"  FAILED: {model_type}: {error!r}")
        totals += counts
        print(f"{model_type}: {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}", flush=True)
    print(f"{len(types)} types: {', '.join(f'{count} {outcome}' for outcome, count in totals.items())}")
    return totals["failed"]


def narrow_config(model_type: str) -> Any:
    """The default configuration with few and narrow heads, so that a small model of it is quick to run."""
    config = config_of(model_type)
    text = text_section(config)
    sizes = {key: size for key, size in _NARROW.items() if isinstance(getattr(text, key, None), int)}
    if getattr(text, "kv_lora_rank", None):  # all heads share the latent
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    sizes |= NARROW.get(text.model_type, {})
    if text is config:
        return config_of(model_type, **sizes)
    return config_of(model_type, text_config={**text.to_diff_dict(), **sizes})


def compare_layers(types: list[str]) -> int:
    """Print where the layers read of config.json differ from those of a small model. Returns the number of types."""
    import json

    from ropecli.config.families import family_of
    from ropecli.config.settings import read_settings
    from ropecli.errors import CheckpointError

    counts: Counter[str] = Counter()
    probed: dict[str, Any] = {}
    for model_type in types:
        family = family_of({"model_type": model_type})
        if not (family.rotary or family.refused):
            continue
        try:
            config = config_of(model_type)
            read = read_settings(json.loads(config.to_json_string(use_diff=False))).layers
        except (CheckpointError, ValueError, AttributeError) as error:
            counts["refused"] += 1
            print(f"{model_type}: refused: {error}", flush=True)
            continue
        text = text_section(config).to_json_string(use_diff=False)  # several types have the same text model
        found = probed[text] = probed[text] if text in probed else _probed(model_type)
        if isinstance(found, str):
            outcome, told = "not run", f"{_kinds(read)}; not run: {found}"
        elif any(layer.attention is None for layer in read):
            outcome, told = "unknown", f"unknown; run: {_kinds(found)}"
        elif _compared(read) == _compared(found):
            outcome, told = "equal", _kinds(read)
        else:
            outcome, told = "different", f"{_kinds(read)}; run: {_kinds(found)}"
        counts[outcome] += 1
        print(f"{'DIFFERENT ' * (outcome == 'different')}{model_type}: {told}", flush=True)
    print(f"{counts.total()} types: {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}")
    return counts["different"]


def _probed(model_type: str) -> Any:
    """The layers of a small model that another process runs, or why they are not known."""
    processes = multiprocessing.get_context("fork")  # the libraries are loaded once
    receiver, sender = processes.Pipe(duplex=False)
    process = processes.Process(target=_probe, args=(model_type, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        return f"more than {_SECONDS} s of CPU time, or killed"
    finally:
        process.join()


def _probe(model_type: str, sender: Any) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
    from ropecli.attention.layer_probe import probe_layers

    found: Any = None
    for make in (narrow_config, config_of):
        try:
            found = probe_layers(make(model_type))
            break
        except Exception as error:  # sizes that do not fit, or a model that needs more than tokens
            found = f"{found}; {error}" if found else str(error)
    sender.send(found)


def _compared(layers: Any) -> list[Any]:
    """A small model does not show whether the tokens that a layer sees are compressed."""
    return [layer._replace(attention=layer.attention.replace("compressed", "full"), window=None) for layer in layers]


def _kinds(layers: Any) -> str:
    rotary = {True: "rotary", False: "no positions", None: "?"}
    names = Counter(
        f"{layer.attention or '?'} {rotary[layer.rotates]}{f' {layer.rope}' if layer.rope else ''}"
        f"{' far' if layer.far else ''}"
        for layer in layers
    )
    return ", ".join(f"{count} {name}" for name, count in names.items())


def default_reading(model_type: str) -> str:
    """The outcome of reading_of for the type's default config.json."""
    import json

    return reading_of(json.loads(config_of(model_type).to_json_string(use_diff=False)))[0]


def main() -> None:
    import transformers
    from rich.console import Console
    from rich.table import Table

    types = [name for name in sys.argv[1:] if not name.startswith("--")] or all_types()
    if "--layers" in sys.argv:
        sys.exit(compare_layers(types) > 0)
    if "--reading" in sys.argv:
        sys.exit(compare_reading(types) > 0)
    results = list(walk(types))
    table = Table(title=f"transformers {transformers.__version__}, factor {FACTOR:g}", title_justify="left")
    for heading in ("type", "reading", *METHODS, "reason for refusal"):
        table.add_column(heading, overflow="fold")
    for model_type in types:
        own = {result.method: result for result in results if result.model_type == model_type}
        reasons = dict.fromkeys(result.refused for result in own.values() if result.refused)
        cells = [str(own[method].tables or "refused") for method in METHODS]
        table.add_row(model_type, default_reading(model_type), *cells, "; ".join(reasons))
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    console.print(
        "Reading: whether stock transformers builds the tables that ropecli reads from the type's config.json."
    )
    console.print("Numbers: rotary tables of the patched model in stock transformers that match the formulas.")
    console.print(summary(results), markup=False)


if __name__ == "__main__":
    main()
