"""What ropecli takes for granted of a model type, each against transformers' own code: families.json against its config
classes, and the sets written by hand in families.py against live models.
"""

import contextlib
import importlib
import importlib.metadata
import inspect
import json

import pytest
import scripts_by_path
import torch
from tiny_settings import TINY as SIZES
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from ropecli.config import families
from ropecli.config.families import BY_HAND, family_of
from ropecli.config.layers import read_layers

pytestmark = pytest.mark.usefixtures("quiet")
PINNED = "5.23.0"
pinned = pytest.mark.skipif(
    importlib.metadata.version("transformers") != PINNED,
    reason=f"other releases than transformers {PINNED} know other types",
)
LAYERS = ["sliding_attention", "full_attention"]
TINY = {**SIZES, "num_key_value_heads": 2, "head_dim": 32}


coverage = scripts_by_path.load("coverage")


@pytest.fixture(scope="module")
def rotary() -> list[str]:
    """The types of the table that rotate by config.json, text parts of larger ones apart."""
    table = json.loads(families._DATA.read_text())
    alone = (name for name, entry in table.items() if entry.get("rotary", True) and "text_type" not in entry)
    return [name for name in alone if name in CONFIG_MAPPING]


@pytest.mark.slow
@pinned
def test_the_table_is_what_the_script_makes():
    """Half a minute; test_all_architectures.py reads every type by the table, and holds it against live models."""
    assert scripts_by_path.load("make_families").make_table() == json.loads(families._DATA.read_text())


# The sets, each against all types where it can be.


@torch.no_grad()
def uses_its_tables(model_type: str, **settings) -> bool:
    """Whether the logits of a tiny model change with its rotary tables."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**{**TINY, **settings})
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) / 5)
    ids = torch.arange(20)[None]
    before = model(ids, use_cache=False).logits
    for name, table in model.named_buffers():
        if name.endswith("inv_freq"):
            table.mul_(0.3)
    return not torch.equal(before, model(ids, use_cache=False).logits)


EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1}
SLIDING = {
    "afmoe": {**EXPERTS, "num_dense_layers": 1},
    "exaone_moe": {**EXPERTS, "n_group": 1, "topk_group": 1},
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 1},
    **dict.fromkeys(("cohere2_moe", "kolibri1"), EXPERTS),
    **{name: {"use_sliding_window": True} for name in ("qwen2", "qwen3")},
    **{name: {} for name in ("cohere2", "cwm", "exaone4", "flint", "gemma2", "ministral", "vaultgemma")},
}


@pytest.mark.parametrize("model_type", SLIDING)
def test_which_types_rotate_only_in_sliding_layers(model_type):
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this release of transformers does not know {model_type}")
    settings = {"sliding_window": 8, **SLIDING[model_type]}
    assert uses_its_tables(model_type, layer_types=LAYERS, **settings)
    settings |= {"layer_types": ["full_attention"] * 2}
    layers = read_layers(settings, family_of({"model_type": model_type}))
    rotates = any(layer.rotates for layer in layers)
    assert uses_its_tables(model_type, **settings) is rotates
    assert rotates is not (model_type in BY_HAND["rotates_only_in"])


@pinned
def test_the_list_of_types_with_sliding_layers_is_complete(rotary):
    """All types that mix layers by default, with one rope for all, are in the test above."""
    mixed = set()
    for model_type in rotary:
        config = coverage.config_of(model_type)
        nested = any(isinstance(value, dict) for value in config.rope_parameters.values())
        if not nested and set(LAYERS) <= set(getattr(config, "layer_types", None) or ()):
            mixed.add(model_type)
    by_base = {"granite_swa", "granitemoe_swa", "muse_glimmer_text", "muse_spark_text"}
    assert mixed - set(SLIDING) == by_base  # these say by layer_rope_theta which layers rotate
    assert set(SLIDING) >= BY_HAND["rotates_only_in"].keys()


def _rope_parameters(model_type: str, **fields) -> dict:
    """What stock transformers makes of the older fields; {} where it makes nothing of them."""
    config = coverage.config_of(model_type).to_dict()
    if not isinstance(config.get("head_dim"), int):
        config.pop("head_dim", None)
    without = {key: value for key, value in config.items() if key not in ("rope_parameters", "partial_rotary_factor")}
    try:
        return AutoConfig.for_model(**{**without, **fields}).rope_parameters or {}
    except Exception:  # a config class says no in many ways
        return {}


BASES = {name for names in BY_HAND["flat_bases"].values() for name in names.values()}


@pinned
def test_which_layer_types_read_which_flat_fields(rotary):
    bases, scaling = {}, {}
    for model_type in (name for name in rotary if family_of({"model_type": name}).layers):
        layers = len(getattr(coverage.config_of(model_type), "layer_types", None) or ())
        scaled = _rope_parameters(model_type, rope_scaling={"rope_type": "linear", "factor": 3.0})
        scaling[model_type] = {key for key, value in scaled.items() if isinstance(value, dict) and "factor" in value}
        for name in BASES:
            for value in (777.0, [777.0] * layers):
                parameters = _rope_parameters(model_type, **{name: value})
                read = {key for key, value in parameters.items() if value and value["rope_theta"] == 777.0}
                bases.setdefault(model_type, {}).update(dict.fromkeys(read, name))
    expected = {
        name: names for name, names in BY_HAND["flat_bases"].items() if name not in BY_HAND["ignores_flat_bases"]
    }
    expected["olmo3"] = {"full_attention": "rope_theta"}  # the sliding layers get the default, which all released have
    assert {name: names for name, names in bases.items() if names} == expected
    del scaling["dots3_note_text"]  # takes rope_theta for the sliding layers too, if rope_scaling is there
    types = {name: labels for name, labels in scaling.items() if labels}
    assert types == {name: set(labels) for name, labels in BY_HAND["flat_scaling"].items()}


@pinned
def test_who_reads_the_base_and_the_share_by_names_of_its_own(rotary):
    types = set()
    for model_type in rotary:
        linear = {"rope_type": "linear", "factor": 3.0}  # a new one each: config classes write into what they are given
        parameters = _rope_parameters(model_type, rope_scaling=linear, rotary_emb_base=12345.0, rotary_pct=0.75)
        if (parameters.get("rope_theta"), parameters.get("partial_rotary_factor")) == (12345.0, 0.75):
            types.add(model_type)
    assert types == set(BY_HAND["own_names"])


@pinned
def test_who_reads_rotary_dim(rotary):
    fields = {"rope_theta": 1e4, "head_dim": 64, "rotary_dim": 24}
    types = {name for name in rotary if _rope_parameters(name, **fields).get("partial_rotary_factor") == 0.375}
    assert types == BY_HAND["reads_rotary_dim"]


@pytest.mark.slow
@pinned
def test_whose_attention_reads_mscale_all_dim(rotary):
    types = set()
    for model_type in rotary:
        extra = type(coverage.config_of(model_type)).__module__.replace("configuration_", "modeling_")
        with contextlib.suppress(ModuleNotFoundError):  # a type with the model of another
            if "mscale_all_dim" in inspect.getsource(importlib.import_module(extra)):
                types.add(model_type)
    assert types == BY_HAND["reads_mscale_all_dim"]
