"""The transformers 4 line: keyword arguments of the older dialect that, laid over the unpatched config, give the
patched positions. The reader here is transformers 5, which still reads that dialect."""

import ast

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


def test_layer_types_without_an_older_form_are_refused(build):
    checkpoint = ropecli.open_checkpoint(build("modernbert-decoder", head_dim=32))
    with pytest.raises(PatchError, match="no parameters by layer type"):
        export_checkpoint(checkpoint, "transformers-v4")
