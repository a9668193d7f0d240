"""Every language-model type of transformers (causal, multimodal, encoder): patched, or refused with a reason.

Each type's default configuration is patched with four methods. What was written is then built by stock transformers
alone: not ropecli's proof but this file finds the rotary tables, and holds them against the plan's mathematics.
"""

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import scripts_by_path
import torch
from transformers import AutoConfig
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ropecli.attention.patching import patch_to
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.checkpoint.patch_plan import PatchPlan, make_plan
from ropecli.checkpoint.state import read_state
from ropecli.config.families import family_of
from ropecli.errors import RopecliError
from ropecli.live.stock_transformers import auto_class_of
from ropecli.scaling.spec import ScaledRope

PINNED = "5.23.0"
pytestmark = [
    pytest.mark.usefixtures("quiet"),
    pytest.mark.skipif(
        importlib.metadata.version("transformers") != PINNED,
        reason=f"other releases than transformers {PINNED} know other types",
    ),
]

# What the README says; the lists below must add up to it.
TYPES, WORKS, REFUSES = 316, 193, 25

# mrope, interleaved mrope, standard RoPE under text_config, an encoder, an encoder with layer types
KINDS = {"qwen2_vl", "qwen3_vl", "llava", "eurobert", "modernbert", "ernie4_5_vl_moe", "cosmos3_edge"}

POSITION = 3
METHODS = ("yarn", "linear", "ntk", "longrope")
# Have tables, but none that config.json controls: esm stores its table in the weights.
NOT_BY_CONFIG = {"esm", "glm5_next", "inkling2", "nemo_speechlm", "pi0", "t5gemma2"}
# These are made with their parts alone.
NO_MODEL_BY_DEFAULT = {"musicgen", "musicgen_melody"}
TIMM = "requires the timm library"
ONLY_LOCAL = "no layer that sees the whole context has rotary positions"
MIXED_HEADS = "transformers does not support if layers differ in head_dim"
GEMMA4 = (
    "diffusion_gemma",
    "gemma4",
    "gemma4_text",
    "gemma4_unified",
    "gemma4_unified_assistant",
    "gemma4_unified_text",
)
# Layers with a window rotate; layers that see the whole context have no positions.
LOCAL_ROPE = (
    *("afmoe", "aya_vision", "cohere2", "cohere2_moe", "cohere2_vision", "exaone4", "exaone4_5", "exaone_moe", "flint"),
    *("kolibri1", "llama4", "llama4_text", "muse_glimmer", "muse_spark"),
)
# type -> method -> part of the message; a method that is not named works.
REFUSED: dict[str, dict[str, str]] = {
    **{name: dict.fromkeys(METHODS, ONLY_LOCAL) for name in ("beam", *LOCAL_ROPE)},
    **{name: dict.fromkeys(METHODS, TIMM) for name in ("fast_vlm", "gemma3n", "perception_lm")},
    **{name: dict.fromkeys(METHODS, "two levels deep") for name in ("qwen2_5_omni", "qwen3_omni_moe")},
    **{name: dict.fromkeys(("yarn", "longrope"), MIXED_HEADS) for name in GEMMA4},
    "blt": dict.fromkeys(METHODS, "contains the configs of several transformers"),
    "cosmos3_edge": dict.fromkeys(("yarn", "linear", "longrope"), "supports only rope_type default"),
    **{name: {"longrope": MIXED_HEADS} for name in ("dots3_note", "dots3_note_text")},
    "ernie4_5_vl_moe": dict.fromkeys(METHODS, "sorts the frequencies by image axis"),
    "evolla": dict.fromkeys(METHODS, "no causal, multimodal or masked language model"),
    "gemma4_assistant": {
        **dict.fromkeys(("yarn", "longrope"), MIXED_HEADS),
        **dict.fromkeys(("linear", "ntk"), "from this config: The set of layer types producing"),
    },
    "mistral4": {"ntk": "64 pairs rotate in stock transformers, but 32"},
    "recurrent_gemma": dict.fromkeys(METHODS, "limited to the last attention_window_size tokens"),
}


class Table(NamedTuple):
    """A rotary table of a stock model. inv_freq: float64. rotated: distinct values of cos and sin at POSITION."""

    label: str | None
    inv_freq: np.ndarray
    attention_factor: float
    rotated: np.ndarray


class Live(NamedTuple):
    """A stock model without weights. tables: by buffer name. numbers: all plain numbers of the other modules, softmax
    scales among them."""

    tables: dict[str, Table]
    numbers: dict[str, float]


coverage = scripts_by_path.load("coverage")


def build(config: Any) -> Live:
    with torch.device("meta"), no_init_weights():
        model = auto_class_of(config).from_config(config)
    text = config.get_text_config()
    tables: dict[str, Table] = {}
    rotating: set[str] = set()
    for name, module in model.named_modules():
        own = getattr(module, "config", None)
        if type(own) is not type(text) and (own is not None or text is not config):
            continue  # of the vision or audio part
        buffers = [key for key, _ in module.named_buffers(recurse=False) if key.endswith("inv_freq")]
        if buffers:
            rotating.add(name)
            fresh = type(module)(module.config)  # outside of the meta device, so that it has values
            tables |= {f"{name}.{key}": _table(fresh, key) for key in buffers if "original" not in key}
    numbers = {
        f"{name}.{key}": value
        for name, module in model.named_modules()
        if name not in rotating
        for key, value in vars(module).items()
        if isinstance(value, int | float) and key not in ("max_position_embeddings", "rope_theta")
    }
    return Live(tables, numbers)


def _table(module: torch.nn.Module, buffer: str) -> Table:
    label = buffer.removesuffix("inv_freq").removesuffix("_")
    factor = getattr(module, f"{label}_attention_scaling" if label else "attention_scaling", 1.0)
    positions, hidden = torch.tensor([[POSITION]]), torch.zeros(1, 1, 1)
    given = module(hidden, positions, **({"layer_type": label} if label else {}))
    given = (given.real, given.imag) if isinstance(given, torch.Tensor) else given
    rotated = np.unique(torch.cat([part.double().flatten() for part in given]).numpy())
    return Table(label or None, getattr(module, buffer).double().numpy(), float(factor), rotated)


def assert_rotates(name: str, table: Table, rope: ScaledRope) -> None:
    """float32 is exact to some 1e-7 of the pretrained frequency, whatever a method mixes into it."""
    assert table.inv_freq.shape == rope.inv_freq.shape, name
    allowed = 2e-6 * rope.inv_freq + 2e-7 * rope.geometry.powers() + 1e-25
    assert (np.abs(table.inv_freq - rope.inv_freq) <= allowed).all(), name
    assert table.attention_factor == pytest.approx(rope.attention_factor, rel=1e-6), name
    # A pass may use something else than the table: cos and sin are compared as well, in any order.
    angles = POSITION * rope.inv_freq
    expected = rope.attention_factor * np.concatenate([np.cos(angles), np.sin(angles)])
    distances = np.abs(table.rotated[:, None] - expected[None, :])
    assert max(distances.min(axis=0).max(), distances.min(axis=1).max()) < 1e-5, name


def assert_patched(before: Live, after: Live, plan: PatchPlan) -> None:
    assert before.tables.keys() == after.tables.keys()
    assert {table.label for table in after.tables.values()} & set(plan.written)
    for name, table in after.tables.items():
        assert_rotates(name, table, plan.positions.ropes[table.label])
        if table.label in plan.written:
            assert not np.array_equal(table.inv_freq, before.tables[name].inv_freq), f"{name} is unchanged"
        else:
            np.testing.assert_array_equal(table.inv_freq, before.tables[name].inv_freq, err_msg=name)
            assert table.attention_factor == before.tables[name].attention_factor
    # A temperature sits in the tables, or in the attention by DeepSeek's pair, which only this type has by default.
    if plan.source.config["model_type"] != "mistral4":
        assert after.numbers == before.numbers


def selected() -> Iterator[Any]:
    """Every type. The default tests have YaRN alone, for causal LMs and one type of each other kind."""
    for name in coverage.all_types():
        usual = name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or name in KINDS
        yield pytest.param(name, METHODS[:1], marks=() if usual else pytest.mark.slow)
        yield pytest.param(name, METHODS[1:], marks=pytest.mark.slow)


@pytest.mark.parametrize(("model_type", "methods"), selected())
def test_every_type_is_patched_or_refused(model_type, methods, tmp_path):
    if TIMM in REFUSED.get(model_type, {}).values() and importlib.util.find_spec("timm"):
        pytest.skip("with timm, this type is built and patched")
    source = open_checkpoint(coverage.write_checkpoint(model_type, tmp_path / "source"))
    if not family_of({"model_type": model_type}).rotary and model_type not in REFUSED:
        with pytest.raises(RopecliError, match="no rotary position embedding to configure"):
            make_plan(source, coverage.spec_of("yarn", source))
        if model_type not in NO_MODEL_BY_DEFAULT | NOT_BY_CONFIG:
            assert build(AutoConfig.from_pretrained(source.folder)).tables == {}
        return
    refused = {method: message for method, message in REFUSED.get(model_type, {}).items() if method in methods}
    for method, message in refused.items():
        with pytest.raises(RopecliError) as caught:
            patch_to(make_plan(source, coverage.spec_of(method, source)), tmp_path / method)
        assert message in str(caught.value)
        assert not (tmp_path / method).exists()
    working = [method for method in methods if method not in refused]
    if not working and model_type not in LOCAL_ROPE:
        return
    before = build(AutoConfig.from_pretrained(source.folder))
    ropes = read_state(source).positions.ropes
    for name, table in before.tables.items():  # read from config.json alone
        assert_rotates(name, table, ropes[table.label])
    for method in working:
        plan = make_plan(source, coverage.spec_of(method, source))
        patch_to(plan, tmp_path / method, verify=False)  # this file is the proof here
        config = AutoConfig.from_pretrained(tmp_path / method)
        assert config.get_text_config().max_position_embeddings == plan.max_position_embeddings
        assert_patched(before, build(config), plan)


def test_the_counts_are_those_of_the_readme():
    types = set(coverage.all_types())
    refused = {name for name, methods in REFUSED.items() if set(methods) == set(METHODS)}
    without = {name for name in types - refused if not family_of({"model_type": name}).rotary}
    assert set(REFUSED) | KINDS <= types
    assert (len(types), len(types - without - refused), len(refused)) == (TYPES, WORKS, REFUSES)
