"""The command for mlx-lm, checked by running release 0.32.2 (models/rope_utils.py and the model classes).

- It reads `rope_theta` and `rope_scaling` as transformers 4 wrote them. Without them most classes silently use their
  default base, unscaled; a few read `rope_parameters`.
- Many classes read only the base; phi3 also the longrope factors.
- yarn ignores attention_factor (1 + 0.1·ln s) and truncate. It reads mscale and mscale_all_dim; the classes with
  multi-head latent attention also multiply the softmax scale. longrope ignores attention_factor (√(1 + ln s / ln L)).
- There are no options, and no limit from max_position_embeddings.
- qwen3_5 drops the MTP layers; only the multimodal type has a class.
"""

import math

from ropecli.engines import engine_table as shared
from ropecli.engines.engine_table import Case, EngineInput, EngineTable
from ropecli.scaling.yarn import yarn_attention_factor

# model_type of classes that gave transformers' logits with a scaling (test_mlx.py); AS_RELEASED: with their own.
AS_RELEASED = {"deepseek_v3", "gemma3_text", "gemma4_text", "kimi_k2", "minicpm3", "ministral3", "olmo3"}
READ = {
    *("exaone4", "gemma3_text", "granite", "llama", "ministral3", "mistral", "olmo2", "olmoe", "qwen2", "qwen3"),
    *("qwen3_5", "seed_oss", "smollm3"),
}
# model_type of classes that gave the logits of the unscaled model.
BASE_ONLY = {
    *("cohere", "ernie4_5", "gemma", "gemma2", "glm4", "gpt_neox", "helium", "mixtral", "phi", "qwen2_moe"),
    *("qwen3_moe", "stablelm", "starcoder2"),
}
# Types of classes that read rope_parameters, by their source.
_RECENT = {
    *("exaone_moe", "gemma4_text", "glm_moe_dsa", "laguna", "mellum", "ministral3", "mistral4", "muse_glimmer"),
    *("muse_spark", "olmo_hybrid", "qwen3", "qwen3_5_text", "qwen3_5_moe_text", "spark2_5"),
}


def _other_attention_factor(p: EngineInput) -> bool:
    if p.scales_softmax:
        return False
    usual = {"yarn": yarn_attention_factor(p.factor), "longrope": p.usual_longrope_factor}.get(p.rope_type, 1.0)
    return not math.isclose(p.rope.attention_factor, usual, rel_tol=1e-6)


def _reads_layer_types(p: EngineInput) -> bool:
    """Whether mlx-lm's class reads parameters by layer type as transformers does. olmo3 has one base for all layers."""
    if not p.scaled and not p.patched:
        return True
    return p.only_main_scaled and (
        p.text_type in ("gemma3_text", "gemma4_text") or (p.text_type == "olmo3" and not p.patched)
    )


ENGINE = EngineTable(
    title="mlx-lm 0.32.2",
    command=lambda p: ("mlx_lm.server", "--model", p.checkpoint),
    overrides=lambda p: {},
    refused=(
        shared.LATENT_ATTENTION,
        Case(
            lambda p: any(finding.rule == "engine-type" and "mlx-lm" not in finding.message for finding in p.findings),
            "it does not know the rope_type in config.json. Write another: {p.fix}",
        ),
        Case(
            lambda p: p.model_type in ("qwen3_5_text", "qwen3_5_moe_text"),
            "it has no class for {p.model_type}, only for the multimodal type. Convert the patched multimodal folder.",
        ),
        Case(
            lambda p: p.nested and not _reads_layer_types(p),
            "of types with a RoPE per layer type, it was only checked with gemma3_text and gemma4_text, scaled in full "
            "attention layers. Serve the folder with vLLM.",
        ),
        Case(
            lambda p: bool(p.scaled) and p.model_type in BASE_ONLY,
            "its class for {p.model_type} reads rope_theta and silently drops the scaling. Patch with ntk or abf, "
            "which only change the base.",
        ),
        Case(
            lambda p: not p.older_fields and p.text_type not in _RECENT,
            "it reads rope_theta and rope_scaling, which config.json lacks. Write them: {p.fix}",
        ),
        Case(
            lambda p: p.rope_type == "dynamic",
            "it computes another base for each chunk of a prompt. Patch with ntk or yarn.",
        ),
        Case(
            _other_attention_factor,
            "it ignores attention_factor, which is {p.rope.attention_factor:.5g}. Patch with ntk or abf, or with yarn "
            "and its default attention factor.",
        ),
        Case(
            lambda p: p.main.get("truncate") is False and not shared.is_released_gpt_oss(p),
            "it ignores truncate=false. Patch without it.",
        ),
        shared.DROPS_SECTIONS,
    ),
    cannot=(
        shared.ROUNDS_GPT_OSS,
        Case(lambda p: p.has_two_factor_lists, "mlx-lm uses long_factor for every request, also for short ones."),
    ),
    notes=(
        Case(
            lambda p: p.revision is not None,
            "mlx_lm.server has no --revision: `hf download {p.quoted}` prints the folder to give as --model.",
        ),
        Case(
            lambda p: p.section is not None and bool(p.scaled),
            "Serve it with mlx-lm, for text: mlx-vlm 0.7.10 reads only the base of qwen3_5, and ignores the scaling.",
        ),
        Case(
            lambda p: p.model_type not in READ | {"phi3"} and (p.patched or p.text_type not in AS_RELEASED),
            "mlx-lm's class for {p.model_type} was not checked: compare a long answer with transformers first.",
        ),
    ),
)
