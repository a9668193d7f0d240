"""The attention of a patched model: refusals, sliding layers, gradients and compilation."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from ropecli.attention.patching import live_patch
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.checkpoint.patch_plan import make_plan
from ropecli.errors import PatchError
from ropecli.scaling.spec import make_spec

TOKENS = 110
IDS = (torch.arange(1, 2 * TOKENS + 1).reshape(2, TOKENS) * 37) % 511 + 1
ROW = IDS[:1]
LAYERS = ["sliding_attention", "full_attention"]
SLIDING = {
    "gemma2": {"sliding_window": 20, "attn_logit_softcapping": 5.0, "layer_types": LAYERS},
    "gpt_oss": {
        **{"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 20, "layer_types": LAYERS},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
}


def make(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    live_patch(model, make_plan(open_checkpoint(folder), make_spec("rerope", 4.0)).positions.ropes)
    return model


@pytest.fixture(scope="module")
def model(llama):
    return make(llama)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def assert_close(actual, expected):
    assert (actual - expected).abs().max() < 1e-4 * expected.abs().max()


def generate(model, ids=IDS[:, :60], padding=23, **options):
    """Greedily, the second row padded at the left; (tokens, logits)."""
    mask = torch.ones_like(ids)
    mask[1:, :padding] = 0
    actual = model.generate(
        ids * mask,
        attention_mask=mask,
        max_new_tokens=20,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    return actual.sequences, torch.stack(actual.logits, 1)


PACKED = torch.cat([torch.arange(50), torch.arange(60)])[None]
ONES = torch.ones(1, TOKENS, dtype=torch.long)
HOLED = torch.ones(1, TOKENS, dtype=torch.long).index_fill(1, torch.tensor([30]), 0)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"position_ids": PACKED, "use_cache": False}, "packed into one row"),
        ({"position_ids": 2 * torch.arange(TOKENS)[None], "attention_mask": ONES}, "position_ids are not consecutive"),
        ({"attention_mask": torch.ones(1, 1, TOKENS, TOKENS)}, r"a mask of shape \(1, 1, 110, 110\)"),
        ({"attention_mask": HOLED}, "padding between tokens"),
    ],
)
def test_unsupported_masks_and_positions_are_refused(options, reason, model):
    with pytest.raises(PatchError, match=reason):
        model(ROW, **options)


def test_a_mask_without_the_cached_tokens_is_refused(model):
    cache = model(ROW[:, :60]).past_key_values
    with pytest.raises(PatchError, match="The attention mask has 50 tokens; expected 110"):
        model(ROW[:, 60:], attention_mask=ONES[:, 60:], past_key_values=cache)


def test_dropout_is_refused(llama, edited):
    model = make(edited(llama, attention_dropout=0.1)).train()
    with pytest.raises(PatchError, match=r"attention_dropout is 0\.1; .* Set attention_dropout to 0"):
        model(ROW)


@pytest.mark.parametrize("model_type", SLIDING)
def test_sliding_layers_stay_unchanged_beyond_their_window(model_type, build):
    folder = build(model_type, head_dim=32, **SLIDING[model_type])
    model = make(folder)
    tokens, logits = generate(model)
    for options in ({"use_cache": False}, {"cache_implementation": "static"}):
        again, actual = generate(model, **options)
        assert torch.equal(again, tokens)
        assert_close(actual, logits)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    hidden = [each(ROW, use_cache=False, output_hidden_states=True).hidden_states[1] for each in (plain, model)]
    assert_close(hidden[1], hidden[0])  # the first layer slides


def test_gradients_are_equal_with_checkpoints_after_a_pass_for_inference(llama):
    model = make(llama)
    with torch.inference_mode():
        model(ROW)
    gradients = []
    with torch.enable_grad():
        for checkpoints in (False, True):
            if checkpoints:
                model.train()
                model.gradient_checkpointing_enable()
            model.zero_grad()
            model(ROW, labels=ROW, use_cache=False).loss.backward()
            gradients.append(model.model.layers[0].self_attn.q_proj.weight.grad.clone())
    assert gradients[0].abs().max() > 0
    assert_close(gradients[1], gradients[0])


@pytest.mark.slow
def test_a_compiled_model_compiles_around_the_attention(llama):
    model = make(llama)
    expected = model(ROW, use_cache=False).logits
    model = torch.compile(model, backend="eager")
    assert_close(model(ROW, use_cache=False).logits, expected)
    cache = model(ROW[:, :-1]).past_key_values
    assert_close(model(ROW[:, -1:], past_key_values=cache).logits, expected[:, -1:])
