"""Flags for llama.cpp, and a Modelfile for Ollama, which runs llama.cpp.

llama.cpp, checked in the source of llama-cpp-python 0.3.36 (llama.cpp commit 0c1e570):
- Kernel (ggml-cpu/ops.cpp, rope_yarn): θ = m·b^(-2i/d) / factors[i]; interpolated θ/s; YaRN's ramp over pairs, its
  ends always rounded (ggml.c, ggml_rope_yarn_corr_dims); cos and sin times attn_factor·(1 + 0.1·ln s).
- Context (llama-context.cpp): YaRN overwrites --yarn-attn-factor so that the product is 1 + 0.1·ln s. The file's
  `rope.scaling.attn_factor` still multiplies it; --override-kv sets that, also in older builds.
- Converter (conversion/*.py): stores base, linear's factor, and YaRN's factor and original length; llama3 as the
  tensor rope_freqs (some architectures); longrope's factors for phi3 and minicpm3 only, silently dropped for others;
  nothing for dynamic. It stores YaRN's betas and attention factor, but the loader ignores them (except grok,
  mistral3). Of mscale_all_dim, deepseek2 and mistral3 store what transformers computes for mscale = mscale_all_dim.
- Layers (src/models/*.cpp): the flags do not reach sliding-window layers, which read base and scale from the file.
- The server caps a request at the file's context_length. Since 30 August 2026, yarn by a factor that the file does not
  store raises that to the pretraining length × factor.
- qwen3_5 (qwen35.cpp) reads yarn with the sections of multimodal positions. Its MTP layers, and a draft model in a
  file of its own, get the same --rope options (common_base_params_to_speculative).

Ollama, checked in the source of release 0.33.0-rc2 (llm/{server,llama_server}.go, convert/*.go, x/models):
- It runs the llama-server of llama.cpp b10488 with `-c num_ctx` and without --rope options: the scaling is what the
  GGUF stores. `num_ctx` defaults to 4k, 32k or 256k, by the GPU's memory; it is cut to the file's context_length with
  only a line in the server's log.
- `FROM` a folder of safetensors uses Ollama's own converter. For Llama it stores linear and llama3 and silently drops
  yarn, longrope and dynamic; for Qwen3 and Qwen3.5 it stores yarn without the pretraining length.
- Its MLX runner, for imported safetensors, ignores every scaling of llama, qwen3 and qwen3_5.
"""

import math
from typing import Any

import numpy as np

from ropecli.engines import engine_table as shared
from ropecli.engines.engine_table import Case, EngineInput, EngineTable, Same
from ropecli.scaling.base import ntk_theta
from ropecli.scaling.yarn import by_parts, yarn_attention_factor

_MODEL = "model.gguf"
_CONVERTER = "convert_hf_to_gguf.py"
# model_type -> general.architecture in the converted file, as --override-kv needs it.
_ARCHITECTURES = {
    **dict.fromkeys(("llama", "mistral", "mixtral"), "llama"),
    **{name: name for name in ("qwen2", "qwen3", "gemma", "phi3", "olmo", "granite", "stablelm")},
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), "qwen35"),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), "qwen35moe"),
    "phi": "phi2",
}
# Types whose layers differ: the flags reach only some of them. -> rope_type of the layers that see the whole context,
# where the file has all layers right.
_BY_LAYER = {
    **dict.fromkeys(("afmoe", "cohere2", "gemma2", "gpt_oss", "smallthinker"), ("default", "linear", "yarn")),
    **dict.fromkeys(("gemma3_text", "gemma3n_text"), ("default", "linear")),
    "gemma4_text": ("default", "proportional"),
    "llama4_text": ("default", "linear", "yarn", "llama3"),
    "olmo3": ("default", "yarn"),
    "plamo3": (),
}
_LLAMA3_IN_FILE = {"exaone", "exaone4", "llama4_text", "nemotron-nas"}
_MSCALE_IN_FILE = {"deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "ministral3"}


def _command(p: EngineInput) -> tuple[object, ...]:
    options = {**_flags(p), **_overridden(p), "-c": p.length, "-np": 1}
    return ("llama-server", "-m", _MODEL, *(word for option in options.items() for word in option))


def _overrides(p: EngineInput) -> dict[str, Any]:
    return {"-c": str(p.length), **_flags(p), **_overridden(p)}


def _flags(p: EngineInput) -> dict[str, str]:
    if p.scales_softmax:
        return {} if _betas(p) == _USUAL_BETAS else _beta_flags(p)
    if _differs_by_layer(p):
        return {}
    if p.rope_type == "linear":
        return _scaling("linear", p.rope.rope_theta, p.factor)
    if p.rope_type == "yarn":
        return {
            **_scaling("yarn", p.rope.rope_theta, p.factor),
            "--yarn-orig-ctx": str(p.original_length),
            "--yarn-ext-factor": "1",
            **_beta_flags(p),
        }
    if p.rope_type == "dynamic":  # the base of dynamic NTK at the full context length
        s = p.factor
        return _scaling("none", ntk_theta(p.rope.geometry, s * p.length / p.original_length - (s - 1)))
    return _scaling("none", p.rope.rope_theta)


def _scaling(name: str, rope_theta: float, factor: float | None = None) -> dict[str, str]:
    scale = {} if factor is None else {"--rope-scale": _number(factor)}
    return {"--rope-scaling": name, **scale, "--rope-freq-base": _number(rope_theta)}


def _beta_flags(p: EngineInput) -> dict[str, str]:
    fast, slow = _betas(p)
    return {"--yarn-beta-fast": _number(fast), "--yarn-beta-slow": _number(slow)}


def _overridden(p: EngineInput) -> dict[str, str]:
    """The option that overrides the file's metadata."""
    if p.rope_type == "dynamic":
        item = f"context_length=int:{p.length}"
    elif p.rope_type == "yarn" and not _usual_yarn_factor(p) and not p.scales_softmax:
        item = f"rope.scaling.attn_factor=float:{p.rope.attention_factor / yarn_attention_factor(p.factor):.9g}"
    else:
        return {}
    return {"--override-kv": f"{_ARCHITECTURES.get(p.model_type)}.{item}"}


def _number(value: float) -> str:
    """The shortest text that reads back exactly: 4, 0.878, 1000000."""
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))


_USUAL_BETAS = (32.0, 1.0)


def _betas(p: EngineInput) -> tuple[float, float]:
    fast, slow = _USUAL_BETAS
    return float(p.main.get("beta_fast", fast)), float(p.main.get("beta_slow", slow))


def _usual_yarn_factor(p: EngineInput) -> bool:
    return math.isclose(p.rope.attention_factor, yarn_attention_factor(p.factor), rel_tol=1e-9)


def _unrounded_ramp(p: EngineInput) -> bool:
    if p.rope_type != "yarn":
        return False
    rounded = by_parts(p.rope.geometry, p.factor, *_betas(p), True)
    return not np.allclose(rounded, p.rope.inv_freq, rtol=1e-6, atol=0)


def _stored_in_file(p: EngineInput) -> bool:
    """Return whether the converted file has the whole scaling, so that llama.cpp needs no --rope options."""
    if _differs_by_layer(p):
        if not p.scaled and not p.patched:
            return True
        if p.rope_type not in _BY_LAYER.get(p.text_type, ()) or not p.only_main_scaled:
            return False
    if p.rope_type == "yarn":
        right = _stores_mscale(p) if p.scales_softmax else _usual_yarn_factor(p)
        return right and _betas(p) == _USUAL_BETAS and (shared.is_released_gpt_oss(p) or not _unrounded_ramp(p))
    if p.rope_type == "longrope":
        return _stores_longrope(p)
    if p.rope_type == "llama3":
        return _stores_llama3(p)
    return p.rope_type != "dynamic"


def _differs_by_layer(p: EngineInput) -> bool:
    """Return whether layers differ in their positions: by layer type, or for sliding windows."""
    return p.nested or p.text_type in _BY_LAYER


def _stores_mscale(p: EngineInput) -> bool:
    return p.text_type in _MSCALE_IN_FILE and math.isclose(p.rope.attention_factor, 1.0, rel_tol=1e-9)


def _stores_llama3(p: EngineInput) -> bool:
    return p.text_type in _LLAMA3_IN_FILE or _ARCHITECTURES.get(p.model_type) == "llama"


def _stores_longrope(p: EngineInput) -> bool:
    """Return whether a GGUF stores longrope's factors and this attention factor."""
    stored = {"phi3": p.usual_longrope_factor, "minicpm3": 1.0}.get(p.model_type, math.inf)
    return math.isclose(p.rope.attention_factor, stored, rel_tol=1e-6)


_CHECKED = {*_BY_LAYER, *_LLAMA3_IN_FILE, *_MSCALE_IN_FILE, "minicpm3"}
_CARRIED = Same(f"{_MODEL} already contains all of it: llama.cpp gives the same results without the --rope options.")
_CONVERSION_NOTES = (
    Case(
        lambda p: p.state.checkpoint.commit is None, f"To make {_MODEL}: {_CONVERTER} {{p.quoted}} --outfile {_MODEL}."
    ),
    Case(
        lambda p: bool(p.state.checkpoint.commit),
        f"To make {_MODEL}: hf download {{p.quoted}} prints a local folder, DIR; "
        f"then run {_CONVERTER} DIR --outfile {_MODEL}.",
    ),
    Case(
        lambda p: p.model_type not in _ARCHITECTURES and p.text_type not in _CHECKED,
        "llama.cpp was not checked with {p.model_type}: compare a long answer with transformers first.",
    ),
)


def _without_options(p: EngineInput) -> str:
    if not p.raised and p.rope_type != "dynamic":
        return (
            "config.json states a context length of {p.written_length} tokens, at which llama-server stops. Raise "
            "max_position_embeddings before the conversion."
        )
    if not _flags(p):
        return ""
    partly = f"{_MODEL} contains YaRN's factor and pretraining length, but not its betas and attention factor."
    texts = {
        **dict.fromkeys(("default", "linear", "llama3"), _CARRIED),
        "yarn": _CARRIED if _stored_in_file(p) else partly,
    }
    return shared.without_options(p, texts)


LLAMA_CPP = EngineTable(
    title="llama.cpp",
    command=_command,
    overrides=_overrides,
    refused=(
        shared.LATENT_ATTENTION,
        shared.PROPORTIONAL_FACTOR,
        Case(
            lambda p: p.nested and not _stored_in_file(p),
            "its flags apply to all layers, but the parameters differ by layer type. Serve the folder with vLLM.",
        ),
        Case(
            lambda p: _differs_by_layer(p) and not _stored_in_file(p),
            "its flags do not apply to the sliding-window layers of {p.model_type}, and its files do not store all of "
            "this {p.rope_type} scaling for them. Serve the folder with vLLM.",
        ),
        Case(
            lambda p: p.scales_softmax and not _stores_mscale(p),
            "no flag sets mscale_all_dim, and its files for {p.text_type} do not store it as transformers computes "
            "it. Serve the folder with vLLM.",
        ),
        Case(
            lambda p: _unrounded_ramp(p) and not shared.is_released_gpt_oss(p),
            "it always rounds the ends of YaRN's ramp. Patch without truncate=false.",
        ),
        Case(
            lambda p: p.rope_type == "llama3" and not _stores_llama3(p),
            "no flag sets llama3's bands, and its files for {p.model_type} store no per-pair factors. Patch with yarn.",
        ),
        Case(
            lambda p: p.rope_type == "longrope" and p.model_type == "phi3" and not _stores_longrope(p),
            "no flag sets a factor per pair, and its converter stores the factors with attention factor "
            "√(1 + ln s / ln L) = {p.usual_longrope_factor:.5g}; this folder has {p.rope.attention_factor:.5g}. "
            "Patch with ntk or abf, or with longrope and its default attention factor.",
        ),
        Case(
            lambda p: p.rope_type == "longrope" and p.model_type != "phi3" and not _stores_longrope(p),
            "no flag sets a factor per pair, and its converter silently drops longrope's for {p.model_type}. "
            "A GGUF of architecture llama can store them: tensors rope_factors_long.weight and "
            "rope_factors_short.weight (float32, base frequency ÷ frequency for each pair), llama.rope.scaling.type "
            "longrope, and llama.rope.scaling.attn_factor {p.rope.attention_factor:.9g}. Or patch with yarn.",
        ),
        Case(
            lambda p: bool(_overridden(p)) and p.model_type not in _ARCHITECTURES,
            "it needs --override-kv with the GGUF architecture name, which is unknown for {p.model_type}; a wrong "
            "name is silently ignored. Patch with linear, ntk, abf, or yarn with its default attention factor.",
        ),
    ),
    cannot=(
        shared.ONE_DYNAMIC_TABLE,
        shared.ROUNDS_GPT_OSS,
        Case(
            lambda p: p.rope_type == "llama3",
            f"No flag sets llama3's bands: they are in the tensor rope_freqs, which {_CONVERTER} writes.",
        ),
        Case(
            lambda p: p.rope_type == "llama3" and p.patched,
            "A file converted from the unpatched folder stays unscaled.",
        ),
        Case(
            lambda p: p.rope_type == "longrope",
            "No flag sets longrope's factors: they are in the file. Once -c is above {p.original_length}, every "
            "request uses the long ones.",
        ),
    ),
    without_options=_without_options,
    notes=(
        Case(lambda p: not _flags(p), f"{_MODEL} contains all of RoPE: the command needs no --rope options."),
        *_CONVERSION_NOTES,
        Case(
            lambda p: p.rope_type == "yarn" and bool(_flags(p)),
            "With these options a file of the unpatched model gives the same. Builds older than 30 August 2026 stop at "
            "its context_length.",
        ),
        Case(
            lambda p: bool(p.scaled) and p.draft_layers > 0,
            "To draft with the MTP layers, add --spec-type draft-mtp. The draft gets the same --rope options.",
        ),
    ),
)

_OLLAMA_NAME = "my-model"
OLLAMA = EngineTable(
    title="Ollama",
    command=lambda p: ("ollama", "create", _OLLAMA_NAME, "-f"),
    overrides=lambda p: {"FROM": f"./{_MODEL}", "PARAMETER num_ctx": p.length},
    file_name="Modelfile",
    file_text=lambda overrides: "".join(f"{instruction} {value}\n" for instruction, value in overrides.items()),
    refused=(
        shared.LATENT_ATTENTION,
        shared.PROPORTIONAL_FACTOR,
        Case(
            lambda p: _differs_by_layer(p) and not _stored_in_file(p),
            "it has no RoPE options, and the layers of {p.model_type} differ. Serve the folder with vLLM.",
        ),
        Case(
            lambda p: not _stored_in_file(p),
            f"it has no RoPE options, and {_CONVERTER} does not store all of this {{p.rope_type}} scaling for "
            "{p.model_type}. Patch with linear, ntk, abf, or yarn with its default betas and attention factor; or "
            "serve it with another engine.",
        ),
        Case(
            lambda p: not p.raised,
            "it reads no more than max_position_embeddings, {p.written_length} tokens; the scaling reaches {p.length}. "
            "Raise max_position_embeddings.",
        ),
    ),
    cannot=(shared.ROUNDS_GPT_OSS,),
    notes=(
        *_CONVERSION_NOTES,
        Case(
            lambda p: p.rope_type in ("yarn", "longrope"),
            f"Keep FROM ./{_MODEL}: Ollama's own converter of safetensors folders, and its MLX runner, silently drop "
            "{p.rope_type} or a part of it.",
        ),
        Case(
            lambda p: p.has_two_factor_lists,
            "Once num_ctx is above {p.original_length}, every request uses long_factor.",
        ),
        f"Then: ollama run {_OLLAMA_NAME}.",
    ),
)
