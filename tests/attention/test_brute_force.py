"""Every method equals a brute force in float64, on every architecture and over frequency methods."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from reference import Reference
from torch import Tensor
from transformers import AutoModelForCausalLM

import ropecli.attention  # noqa: F401
from ropecli.attention.patching import live_patch
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.checkpoint.patch_plan import make_plan
from ropecli.live.rotary import unpatched_after
from ropecli.scaling.registry import scaling_methods
from ropecli.scaling.spec import make_spec

# rotary dimensions of 32: phi3 and glm 16, gpt_neox 8, all others 32
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 32},
    "gemma2": {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 20, "attn_logit_softcapping": 5.0},
    "qwen3": {"head_dim": 32},
    "phi3": {"partial_rotary_factor": 0.5, "original_max_position_embeddings": 64},
    "gpt_neox": {"rotary_pct": 0.25},
    "glm": {"head_dim": 32, "partial_rotary_factor": 0.5},
}
TOKENS = 110
IDS = torch.from_numpy(np.random.default_rng(3).integers(1, 512, (4, TOKENS)))
PADDING = (0, 31, 31, 95)
WITHIN = 1e-4
"""Relative to the largest logit."""

METHODS = {
    "rerope": {"window": 24, "yarn_temperature": True},
    "leaky-rerope": {"window": 20, "slope": 7.0},
    "self-extend": {"window": 15, "group": 6, "llama4_temperature": True},
    "jet-long": {"window": 9},
    "lm-infinite": {"window": 30, "global_tokens": 5},
    "streaming": {"window": 30, "sinks": 3},
    "dual-chunk": {"chunk": 40, "local_window": 9, "log_n": True},
    "string": {"shift": 24, "local_window": 6, "score_factor": 1.3},
}
TRAINED = {"jet-long": 32}  # else 64: 110 tokens are beyond three times its pretraining length
# One rope for all layers, and one whose near layers slide: the caches differ, whatever else an architecture does.
BATCHED = ["llama", "gemma2"]


def test_every_method_is_here():
    remapping = {name for name, method in scaling_methods().items() if method.remaps}
    assert METHODS.keys() == remapping


class Case(NamedTuple):
    """A method on an architecture. model: patched with it. rows: the true logits of every row's own tokens."""

    method: str
    params: dict[str, Any]
    model: Any
    reference: Reference
    rows: list[Tensor]


@pytest.fixture(scope="session", params=ARCHITECTURES)
def subject(request, build) -> tuple[Any, Any, Reference]:
    """(checkpoint, model in float32, brute force in float64) of an architecture."""
    folder = build(request.param, **ARCHITECTURES[request.param])
    # transformers 5.20's sdpa leaves out soft caps
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    return open_checkpoint(folder), model, Reference(folder, neighbours=request.param == "glm")


@pytest.fixture(scope="session", params=METHODS)
def case(subject, request) -> Iterator[Case]:
    method, params, (checkpoint, model, reference) = request.param, METHODS[request.param], subject
    with unpatched_after(model):
        spec, trained = make_spec(method, 1.0 if method == "string" else 4.0, params), TRAINED.get(method, 64)
        live_patch(model, make_plan(checkpoint, spec, original_length=trained).positions.ropes)
        rows = [
            reference.logits(ids[padding:], method, params, trained) for ids, padding in zip(IDS, PADDING, strict=True)
        ]
        yield Case(method, params, model, reference, rows)


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def padded() -> tuple[Tensor, Tensor]:
    """(ids, mask) of all rows, those that are shorter padded at the left."""
    mask = (torch.arange(TOKENS) >= torch.tensor(PADDING)[:, None]).long()
    return IDS * mask, mask


def difference(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected).abs().max() / expected.abs().max()).item()


def read_in_pieces(model: Any, ids: Tensor, sizes: list[int], mask: Tensor | None = None) -> Tensor:
    """The logits of ids, read some at a time with a cache. mask: shape (batch, tokens), of all tokens."""
    assert sum(sizes) == ids.shape[1]
    cache, actual, done = None, [], 0
    for size in sizes:
        seen = {} if mask is None else {"attention_mask": mask[:, : done + size]}
        output = model(ids[:, done : done + size], past_key_values=cache, use_cache=True, **seen)
        cache, done = output.past_key_values, done + size
        actual.append(output.logits)
    return torch.cat(actual, 1)


def assert_rows(actual: Iterable[Tensor], case: Case) -> None:
    for row, padding, expected in zip(actual, PADDING, case.rows, strict=True):
        assert difference(row[padding:], expected) < WITHIN


def test_one_pass_and_chunks_with_a_cache(case):
    actual = case.model(IDS[:1], use_cache=False).logits[0]
    assert difference(actual, case.rows[0]) < WITHIN
    assert difference(actual, case.reference.logits(IDS[0])) > 100 * WITHIN, "the method shows"
    token_by_token = [[20, *[1] * 90]] if case.method in TRAINED else []
    for sizes in ([64, 46], [7, 1, 50, 37, *[1] * 15], *token_by_token):
        assert difference(read_in_pieces(case.model, IDS[:1], sizes)[0], case.rows[0]) < WITHIN, sizes


@pytest.mark.parametrize("subject", BATCHED, indirect=True)
def test_a_batch_with_left_padding(case):
    """As generate makes the positions: from the mask, so that every row counts from its own first token."""
    ids, mask = padded()
    for positions in ({"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}, {}):
        assert_rows(case.model(ids, attention_mask=mask, use_cache=False, **positions).logits, case)
    assert_rows(read_in_pieces(case.model, ids, [20, 60, 1, 29], mask), case)


@pytest.mark.parametrize("cache", [{}, {"prefill_chunk_size": 40}, {"use_cache": False}], ids=str)
@pytest.mark.parametrize("subject", BATCHED, indirect=True)
def test_generating(case, cache):
    """With left padding."""
    ids, mask = padded()
    rows = [0, 3]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    actual = case.model.generate(
        ids[rows], attention_mask=mask[rows], return_dict_in_generate=True, output_logits=True, **options, **cache
    )
    logits = torch.stack(actual.logits, 1)
    for row, tokens, of_row in zip(rows, actual.sequences, logits, strict=True):
        assert len(tokens) == TOKENS + 6
        expected = case.reference.logits(
            tokens[PADDING[row] : -1], case.method, case.params, TRAINED.get(case.method, 64)
        )[-6:]
        assert difference(of_row, expected) < WITHIN


@pytest.mark.parametrize("subject", BATCHED, indirect=True)
def test_a_batch_with_right_padding(case):
    ids = torch.stack([row.roll(-padding) for row, padding in zip(IDS, PADDING, strict=True)])
    mask = padded()[1].flip(1)
    actual = case.model(ids * mask, attention_mask=mask, use_cache=False).logits
    assert_rows([row.roll(padding, 0) for row, padding in zip(actual, PADDING, strict=True)], case)


LONGER = torch.from_numpy(np.random.default_rng(3).integers(1, 512, 150))
FAR = {"chunk": 50, "local_window": 9, "log_n": True}


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
    folder = build(architecture, **ARCHITECTURES[architecture])
    scaled = patched(folder, frequencies, 2.0, **params)
    reference = Reference(scaled, neighbours=architecture == "glm")
    expected = reference.logits(LONGER, "dual-chunk", FAR, trained=128)
    assert difference(reference.logits(LONGER), expected) > 100 * WITHIN, "the distances show"

    method, all_params = f"{frequencies}+dual-chunk", {**params, **FAR, "frequency_factor": 2.0}
    whole = patched(scaled, method, 8.0, **all_params)
    model = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32).eval()
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    live_patch(plain, make_plan(open_checkpoint(folder), make_spec(method, 8.0, all_params)).positions.ropes)
    for patched_model in (model, plain):
        assert difference(patched_model(LONGER[None], use_cache=False).logits[0], expected) < WITHIN
    assert difference(read_in_pieces(model, LONGER[None], [70, 80])[0], expected) < WITHIN
