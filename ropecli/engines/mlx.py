"""The command for mlx-lm, checked by running release 0.32.2 (models/rope_utils.py and the model classes).

- It reads `rope_theta` and `rope_scaling` as transformers 4 wrote them. Without them most classes silently use their
  default base, unscaled; only qwen3 reads `rope_parameters`.
- Many classes read only the base; phi3 also the longrope factors.
- yarn ignores attention_factor (1 + 0.1·ln s) and truncate.
- longrope ignores attention_factor (√(1 + ln s / ln L)) and always uses long_factor.
- dynamic computes a base for each chunk of a prompt, so keys of one prompt are rotated by different bases.
- There are no options, and no limit from max_position_embeddings.
"""

import math

from ropecli.engines.checkpoint_positions import CheckpointPositions
from ropecli.engines.engine_table import DROPS_SECTIONS, Case, EngineTable
from ropecli.scaling.yarn import yarn_attention_factor

# model_type of classes that gave transformers' logits with a scaling (test_mlx.py).
READ = {
    *("exaone4", "gemma3_text", "granite", "llama", "ministral3", "mistral", "olmo2", "olmoe", "qwen2", "qwen3"),
    *("seed_oss", "smollm3"),
}
# model_type of classes that gave the logits of the unscaled model.
BASE_ONLY = {
    *("cohere", "ernie4_5", "gemma", "gemma2", "glm4", "gpt_neox", "helium", "mixtral", "phi", "qwen2_moe"),
    *("qwen3_moe", "stablelm", "starcoder2"),
}


def _other_attention_factor(p: CheckpointPositions) -> bool:
    usual = {"yarn": yarn_attention_factor(p.factor), "longrope": p.usual_longrope_factor}.get(p.rope_type, 1.0)
    return not math.isclose(p.rope.attention_factor, usual, rel_tol=1e-6)


ENGINE = EngineTable(
    title="mlx-lm 0.32.2",
    command=lambda p: ("mlx_lm.server", "--model", p.checkpoint),
    overrides=lambda p: {},
    refused=(
        Case(
            lambda p: p.nested and (p.model_type != "gemma3_text" or any(one is not p.main for one in p.scaled)),
            "of types with a RoPE per layer type, it was only checked with gemma3_text, scaled in full attention "
            "layers. Serve the folder with vLLM.",
        ),
        Case(
            lambda p: bool(p.scaled) and p.model_type in BASE_ONLY,
            "its class for {p.model_type} reads rope_theta and silently drops the scaling. Patch with ntk or abf, "
            "which only change the base.",
        ),
        Case(
            lambda p: not p.older_fields and p.model_type != "qwen3",
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
        Case(lambda p: p.main.get("truncate") is False, "it ignores truncate=false. Patch without it."),
        DROPS_SECTIONS,
    ),
    cannot=(Case(lambda p: p.has_two_factor_lists, "mlx-lm uses long_factor for every request, also for short ones."),),
    notes=(
        Case(
            lambda p: p.revision is not None,
            "mlx_lm.server has no --revision: `hf download {p.quoted}` prints the folder to give as --model.",
        ),
        Case(
            lambda p: p.model_type not in READ and p.model_type != "phi3",
            "mlx-lm's class for {p.model_type} was not checked: compare a long answer with transformers first.",
        ),
    ),
)
