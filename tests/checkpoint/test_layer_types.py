"""Models whose layers see differently far: each layer type has its own rope, and only the far-seeing one is scaled,
or those that the user chooses."""

import numpy as np
import pytest
import yaml

from ropecli.attention.patching import patch_to
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.checkpoint.patch_plan import make_plan
from ropecli.errors import PatchError
from ropecli.scaling.spec import make_spec

LAYERS = ["sliding_attention", "full_attention"]
MODELS = {
    "gemma3_text": {"head_dim": 32},
    "olmo3": {},
    "modernbert-decoder": {"cls_token_id": 0, "sep_token_id": 0},
}
NEAR = ["sliding_attention"]


@pytest.fixture(scope="module")
def model(build):
    """model("olmo3") -> its tiny checkpoint with a sliding and a full layer, built once."""
    built = {}

    def get(name: str):
        if name not in built:
            built[name] = build(name, layer_types=LAYERS, sliding_window=32, **MODELS[name])
        return built[name]

    return get


@pytest.fixture
def patch(tmp_path):
    """patch(folder, ["full_attention"], "linear", 4.0) -> the folder written, and proved."""

    def write(folder, layer_types, method="linear", factor=4.0):
        plan = make_plan(open_checkpoint(folder), make_spec(method, factor), layer_types=layer_types)
        output = tmp_path / f"patched-{len(list(tmp_path.glob('patched-*')))}"
        patch_to(plan, output)
        return output

    return write


@pytest.mark.parametrize(
    ("name", "method", "chosen"),
    [
        ("gemma3_text", "ntk", NEAR),
        pytest.param(
            "olmo3", "yarn", LAYERS, marks=pytest.mark.transformers("5.14", "olmo3 has one set of RoPE fields")
        ),
        ("modernbert-decoder", "ntk", LAYERS[::-1]),
    ],
)
def test_only_the_named_layer_types_are_scaled(name, method, chosen, model, patch, live, assert_inspection_is_live):
    folder = patch(model(name), chosen, method)
    before, after = live(model(name)), live(folder)
    for label in LAYERS:
        if label in chosen:
            assert after[label].inv_freq[-1] == pytest.approx(before[label].inv_freq[-1] / 4, rel=2e-6)
        else:
            np.testing.assert_array_equal(after[label].inv_freq, before[label].inv_freq)
            assert after[label].attention_factor == 1.0
    assert_inspection_is_live(folder)
    note = yaml.safe_load((folder / "ropecli.yaml").read_text())
    assert set(note["scaling"]["layer_types"]) == set(chosen)
    (folder / "ropecli.yaml").unlink()
    assert_inspection_is_live(folder)


def test_older_fields_keep_meaning_the_layers_with_full_attention(model, edited, patch, live, config_of):
    """As released Gemma 3 has them; they win over rope_parameters in transformers 5."""
    linear = {"rope_type": "linear", "factor": 2.0}
    fields = {"rope_parameters": ..., "rope_theta": 2e6, "rope_local_base_freq": 15000.0, "rope_scaling": linear}
    older = edited(model("gemma3_text"), **fields)
    folder = patch(older, ["sliding_attention"], "ntk")
    np.testing.assert_array_equal(live(folder)["full_attention"].inv_freq, live(older)["full_attention"].inv_freq)
    config = config_of(folder)
    assert (config["rope_theta"], bool(config["rope_scaling"])) == (2e6, True)
    assert config["rope_local_base_freq"] == pytest.approx(15000.0 * 4 ** (32 / 30))


def test_a_layer_type_without_positions_is_refused(model, llama):
    for folder, message in ((llama, "none, all layers share one"), (model("gemma3_text"), "has unknown full;")):
        with pytest.raises(PatchError, match=message):
            make_plan(open_checkpoint(folder), make_spec("linear", 4.0), layer_types=["full"])
