"""The transformers 4 line: keyword arguments of the older dialect that, laid over the unpatched config, give the
patched positions. The reader here is transformers 5, which still reads that dialect."""

import ast
import dataclasses

import numpy as np
import pytest

import ropecli
from ropecli.errors import PatchError
from ropecli.export.engine import export_checkpoint

WINDOW, TARGET = 256, 1024


def arguments_of(command: str) -> tuple[str, dict]:
    call = ast.parse(command, mode="eval").body
    assert ast.unparse(call.func) == "AutoModelForCausalLM.from_pretrained"
    return ast.literal_eval(call.args[0]), {one.arg: ast.literal_eval(one.value) for one in call.keywords}


def test_the_arguments_make_the_patched_positions(patch, patched):
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    folder, rope, checkpoint = patched(patch)
    export = export_checkpoint(checkpoint, "transformers-v4")
    model, arguments = arguments_of(export.command)
    assert (model, arguments) == (str(folder), export.overrides)
    stated = {key: value for key, value in checkpoint.config.items() if key not in ("rope_parameters", *arguments)}
    config = AutoConfig.for_model(**stated, **arguments)
    live = LlamaRotaryEmbedding(config)
    if patch != "dynamic":  # there the length decides; its base is what is pretrained
        np.testing.assert_allclose(live.inv_freq.double().numpy(), rope.inv_freq, rtol=1e-6, atol=1e-20)
    assert live.attention_scaling == pytest.approx(rope.attention_factor, rel=1e-6)
    assert config.max_position_embeddings == (WINDOW if patch == "dynamic" else TARGET)


@pytest.mark.parametrize("patch_name", ["linear", "dynamic"])
def test_releases_up_to_4_42_let_two_fields_pass(patch_name, patched):
    """Their validation: a dictionary of exactly two fields, `type`, and `factor`, a float above 1."""
    scaling = export_checkpoint(patched(patch_name).checkpoint, "transformers-v4").overrides["rope_scaling"]
    assert scaling == {"type": patch_name, "factor": 4.0}
    assert isinstance(scaling["factor"], float)


def test_the_release_that_yarn_needs_is_named(patched):
    assert "4.51.0" in export_checkpoint(patched("yarn").checkpoint, "transformers-v4").cannot[0]
    untruncated = export_checkpoint(patched("yarn", truncate=False).checkpoint, "transformers-v4")
    assert "4.55.0" in untruncated.cannot[1]


def test_gemma3_says_both_bases(build):
    checkpoint = ropecli.open_checkpoint(build("gemma3_text", head_dim=32))
    export = export_checkpoint(checkpoint, "transformers-v4")
    written = checkpoint.config["rope_parameters"]
    assert export.overrides["rope_theta"] == written["full_attention"]["rope_theta"]
    assert export.overrides["rope_local_base_freq"] == written["sliding_attention"]["rope_theta"]


def test_gemma3_keeps_its_bases_apart_where_the_sliding_layers_have_another(patched_model):
    """With ntk, and abf, these differ in their base alone, which has a field of its own."""
    checkpoint = patched_model("gemma3_text", "abf", ["sliding_attention"], beta=50.0)
    overrides = export_checkpoint(checkpoint, "transformers-v4").overrides
    assert (overrides["rope_theta"], overrides["rope_local_base_freq"]) == (1000000.0, 500000.0)
    assert overrides["rope_scaling"] is None


def test_scaled_sliding_layers_are_refused(patched_model):
    checkpoint = patched_model("gemma3_text", "yarn", ["sliding_attention"])
    with pytest.raises(PatchError, match=r"scale the layers that see the whole context alone.* without --layer-types"):
        export_checkpoint(checkpoint, "transformers-v4")


def test_olmo3_has_one_base_for_all_layers(patched_model):
    with pytest.raises(PatchError, match=r"one base for all layers.* keeps rope_theta"):
        export_checkpoint(patched_model("olmo3", "ntk"), "transformers-v4")


def test_olmo3_scales_the_layers_that_see_the_whole_context(patched_model):
    overrides = export_checkpoint(patched_model("olmo3", "yarn"), "transformers-v4").overrides
    assert overrides["rope_scaling"]["factor"] == 4.0
    assert "rope_local_base_freq" not in overrides


def test_phi3_takes_three_fields(config_only):
    """Phi3Config's validation, 4.57.3: exactly these."""
    lists = {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
    config = {"model_type": "phi3", "max_position_embeddings": TARGET, "original_max_position_embeddings": WINDOW}
    export = export_checkpoint(config_only(**config, rope_scaling={"type": "longrope", **lists}), "transformers-v4")
    assert export.overrides["rope_scaling"] == {"type": "longrope", **lists}
    assert export.overrides["original_max_position_embeddings"] == WINDOW


def test_phi3_takes_no_attention_factor(patched_model):
    with pytest.raises(PatchError, match=r"takes no 1\.1386 in its place.* ntk or abf"):
        export_checkpoint(patched_model("phi3", "yarn"), "transformers-v4")


@pytest.mark.parametrize("method", ["linear", "dynamic"])
def test_olmo_takes_two_fields(method, patched_model):
    scaling = export_checkpoint(patched_model("olmo2", method), "transformers-v4").overrides["rope_scaling"]
    assert scaling == {"type": method, "factor": 4.0}


def test_olmo_takes_nothing_else(patched_model):
    with pytest.raises(PatchError, match=r"`type` and `factor` and nothing else.* by linear, dynamic, ntk or abf"):
        export_checkpoint(patched_model("olmo2", "yarn"), "transformers-v4")


@pytest.mark.parametrize(("target", "warned"), [(TARGET, False), (2 * TARGET, True)])
def test_releases_that_take_the_windows_ratio_for_the_factor_are_named(target, warned, tmp_path):
    """4.51 to 4.55."""
    spec = ropecli.ScalingSpec("yarn", 4.0)
    plan = ropecli.make_plan(ropecli.open_checkpoint("demo"), spec, target_length=target, choose_factor=False)
    ropecli.patch_to(plan, tmp_path / "patched", verify=False)
    cannot = export_checkpoint(ropecli.open_checkpoint(tmp_path / "patched"), "transformers-v4").cannot
    assert any("windows' ratio, 8, for YaRN's factor, which is 4" in sentence for sentence in cannot) == warned


def test_a_patched_folder_is_said_to_carry_it_all(patch, patched):
    """There the line changes nothing: stripped of its fields, config.json no longer carries them."""
    checkpoint = patched(patch).checkpoint
    bare = dataclasses.replace(checkpoint, config={**checkpoint.config, "rope_scaling": None, "rope_theta": 1e4 + 1})
    assert said_to_carry(checkpoint)
    assert bare.config["rope_parameters"]
    assert not said_to_carry(bare)


def test_what_stands_in_rope_scaling_as_well_does_not_hide_that(patched_model):
    """GPT-NeoX reads base and share by names of its own, so that a patch writes them into rope_scaling too."""
    checkpoint = patched_model("gpt_neox", "yarn")
    assert "rope_theta" in checkpoint.config["rope_scaling"]
    assert said_to_carry(checkpoint)


def said_to_carry(checkpoint) -> bool:
    return any(
        "carries these fields already" in note for note in export_checkpoint(checkpoint, "transformers-v4").notes
    )


def test_a_keyword_that_the_config_may_not_know_is_named(config_only):
    """Stock transformers 4 hands it to the model's class then, which stops."""
    fields = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    cannot = export_checkpoint(config_only(rope_parameters=fields), "transformers-v4").cannot
    assert any("no partial_rotary_factor at its top" in sentence for sentence in cannot)


def test_what_is_under_text_config_is_not_reached(config_only):
    text = {"max_position_embeddings": WINDOW, "rope_theta": 10000.0, "head_dim": 32, "model_type": "llama"}
    with pytest.raises(PatchError, match=r"under text_config.* that `ropecli patch` wrote"):
        export_checkpoint(
            config_only(model_type="llava", text_config={**text, "rope_parameters": {"rope_theta": 5e5}}),
            "transformers-v4",
        )


def test_layer_types_without_an_older_form_are_refused(build):
    checkpoint = ropecli.open_checkpoint(build("modernbert-decoder", head_dim=32))
    with pytest.raises(PatchError, match="no parameters by layer type"):
        export_checkpoint(checkpoint, "transformers-v4")
