"""What becomes of every causal-LM type, proved or refused by a small model of it."""

import importlib.metadata

import pytest
import scripts_by_path
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ropecli.attention.head_layout import HeadLayout
from ropecli.attention.patching import with_layout
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.checkpoint.patch_plan import make_plan
from ropecli.config.families import family_of
from ropecli.errors import RopecliError
from ropecli.scaling.spec import make_spec

PINNED = "5.23.0"
pytestmark = pytest.mark.usefixtures("quiet")
coverage = scripts_by_path.load("coverage")

# What a default configuration lacks to run, to attend at all, or to see the whole context.
SETTINGS = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0, "kv_n_heads": 8}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"num_experts_per_tok": 2},
    "mistral": {"sliding_window": None},
}
NEIGHBOURS = {"cohere", "deepseek_v2", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium"}
# multi-head latent attention: what turns comes after what does not
LATER_START = {
    **dict.fromkeys(("axk1", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "longcat_flash", "youtu"), 128),
    "glm4_moe_lite": 192,
    "minicpm3": 64,
}
# beyond the causal LMs: multimodal without and with mrope, an encoder
OTHERS = ("eurobert", "llava", "qwen2_vl")
WORKS, REFUSES = 99, 34
NO_POSITIONS = "do not rotate by the rotary tables"
SPARSE = "perhaps because it uses the mask itself, as sparse attention does"
AFTERWARDS = "changes queries or keys after the rotation"
NO_FUNCTION = "No layer uses transformers' attention interface"
REFUSED = {
    **dict.fromkeys(("afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe"), NO_POSITIONS),
    **dict.fromkeys(("flint", "kolibri1", "smollm3"), NO_POSITIONS),
    **dict.fromkeys(("axk2", "deepseek_v32", "doge", "dots3_note", "dots3_note_text", "glm_moe_dsa"), SPARSE),
    **dict.fromkeys(("hy_v4", "qwen4_exp_text"), SPARSE),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "nanochat"), AFTERWARDS),
    **dict.fromkeys(("falcon", "gpt_neox_japanese"), NO_FUNCTION),
    **dict.fromkeys(("llama4", "llama4_text"), "hides part of the context"),
    **dict.fromkeys(("qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen4_exp"), "needs one position per token"),
    "beam": "no layer that sees the whole context has rotary positions",
    "blt": "contains the configs of several transformers",
    "deepseek_v4": "changes the attention mask",
    "eurobert": "is an encoder",
    "gemma4_assistant": "cannot build a model",
    "ministral": "a distance method has no effect",
    "recurrent_gemma": "the context cannot be extended",
}
# All others take minutes together.
AT_ONCE = {
    *("axk2", "bitnet", "doge", "ernie4_5", "gemma2", "glm", "got_ocr2", "granite_swa", "lfm2", "minicpm3"),
    *("eurobert", "llava", "falcon", "modernbert-decoder", "nanochat", "qwen2_vl", "olmoe", "smollm3", "youtu", "zaya"),
}


def rotary_types():
    """The causal-LM types, and one of each other kind."""
    names = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *OTHERS]
    return [name for name in sorted(names) if family_of({"model_type": name}).rotary]


def config_of(model_type):
    return coverage.config_of(model_type, **SETTINGS.get(model_type, {}))


@pytest.mark.skipif(
    importlib.metadata.version("transformers") != PINNED, reason=f"other releases than {PINNED} know other types"
)
@pytest.mark.parametrize(
    "model_type", [name if name in AT_ONCE else pytest.param(name, marks=pytest.mark.slow) for name in rotary_types()]
)
def test_every_type_is_proved_or_refused_with_its_reason(model_type, tmp_path):
    config_of(model_type).save_pretrained(tmp_path)
    if model_type in REFUSED:
        with pytest.raises(RopecliError) as caught:
            layout_of(tmp_path)
        assert REFUSED[model_type] in str(caught.value)
        return
    assert layout_of(tmp_path) == HeadLayout(LATER_START.get(model_type, 0), model_type in NEIGHBOURS)


def layout_of(folder):
    """As `ropecli patch` finds and proves it, by ReRoPE."""
    plan = make_plan(open_checkpoint(folder), make_spec("rerope", 4.0))
    saved = with_layout(plan).remapping
    return HeadLayout(saved.rotary_start, saved.neighbours)


@pytest.mark.skipif(
    importlib.metadata.version("transformers") != PINNED, reason=f"other releases than {PINNED} know other types"
)
def test_the_counts_are_those_of_the_page():
    types = set(rotary_types())
    assert set(REFUSED) | NEIGHBOURS | set(LATER_START) | AT_ONCE <= types
    assert (len(types - set(REFUSED)), len(REFUSED)) == (WORKS, REFUSES)
