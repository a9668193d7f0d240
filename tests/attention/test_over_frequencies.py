"""A distance method on top of a frequency method, written and loaded by stock transformers, is the brute force."""

import numpy as np
import pytest
import torch
from reference import Reference
from transformers import AutoModelForCausalLM

import ropecli.attention  # noqa: F401
from ropecli.attention.patching import live_patch
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.checkpoint.patch_plan import make_plan
from ropecli.scaling.spec import make_spec

IDS = torch.from_numpy(np.random.default_rng(3).integers(1, 512, (1, 150)))
FAR = {"chunk": 50, "local_window": 9, "log_n": True}
WITHIN = 1e-4
"""Relative to the largest logit."""


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize(
    ("architecture", "frequencies", "params"),
    [
        ("llama", "yarn", {"beta_fast": 4.0}),
        ("llama", "abf+yarn+cope", {"beta": 3.0, "clipped_pairs": 5}),
        ("glm", "yarn+resonance", {}),
    ],
)
def test_dual_chunk_over_frequencies(architecture, frequencies, params, build, patched):
    """The reference reads the folder of the frequency method alone, at the distances of the papers' formula."""
    settings = {"head_dim": 32, "partial_rotary_factor": 0.5} if architecture == "glm" else {"head_dim": 32}
    folder = build(architecture, **settings)
    scaled = patched(folder, frequencies, 2.0, **params)
    reference = Reference(scaled, neighbours=architecture == "glm")
    expected = reference.logits(IDS[0], "dual-chunk", FAR, trained=128)
    assert difference(reference.logits(IDS[0]), expected) > 100 * WITHIN, "the distances show"

    method, all_params = f"{frequencies}+dual-chunk", {**params, **FAR, "frequency_factor": 2.0}
    whole = patched(scaled, method, 8.0, **all_params)
    model = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32).eval()
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    live_patch(plain, make_plan(open_checkpoint(folder), make_spec(method, 8.0, all_params)).ropes)
    with torch.no_grad():
        for patched_model in (model, plain):
            assert difference(patched_model(IDS, use_cache=False).logits[0], expected) < WITHIN
        half = model(IDS[:, :70], use_cache=True)
        rest = model(IDS[:, 70:], past_key_values=half.past_key_values)
    assert difference(torch.cat([half.logits, rest.logits], 1)[0], expected) < WITHIN
