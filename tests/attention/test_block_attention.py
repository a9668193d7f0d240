"""Blockwise attention against the whole matrix of scores, in float64."""

import numpy as np
import pytest
import torch

from ropecli.attention import block_attention
from ropecli.attention.block_attention import BlockAttention, Rotation
from ropecli.remapping.near_and_far import jet_long
from ropecli.rope import Branch, Remapping

TOKENS = 45
HALVES = Rotation(10_000.0 ** -(np.arange(3) / 3))
SINKS = torch.tensor([-1.0, 0.5, 2.0, 0.0], dtype=torch.float64)
ROTATIONS = [HALVES, Rotation(HALVES.inv_freq, 0, True), Rotation(HALVES.inv_freq, 2)]
"""By halves, by neighbours, and after dimensions that do not rotate."""


def _near(window: int) -> Branch:
    return Branch(lambda n: np.maximum(n - window + 1, 0), lambda n: n + 1)


def _far(window: int, query, key) -> Branch:
    return Branch(np.zeros_like, lambda n: np.maximum(n - window + 1, 0), query, key)


def _chunks(size: int) -> tuple[Branch, ...]:
    """Its own chunk, the one before and all others, each at other distances."""
    same = Branch(lambda n: n // size * size, lambda n: n + 1)
    last = Branch(lambda n: np.maximum(n // size - 1, 0) * size, lambda n: n // size * size, lambda n: n % size + size)
    earlier = Branch(np.zeros_like, lambda n: np.maximum(n // size - 1, 0) * size, lambda n: 0 * n + 2 * size)
    return same, last, earlier


REMAPPINGS = {
    "plain": Remapping((_near(10**6),)),
    "window": Remapping((_near(7),)),
    "far at one distance": Remapping((_near(6), _far(6, lambda n: np.full_like(n, 6), np.zeros_like))),
    "far in fractions": Remapping((_near(9), _far(9, lambda n: 9 + (n - 9) / 3, lambda m: m / 3))),
    "far in groups": Remapping((_near(8), _far(8, lambda n: n // 4 + 6, lambda m: m // 4))),
    "in groups that grow": jet_long(12, 48, window=5),
    "first and last": Remapping(
        (_near(5), Branch(np.zeros_like, lambda n: np.clip(n - 4, 0, 3), lambda n: np.full_like(n, 5), np.zeros_like))
    ),
    "chunks": Remapping(_chunks(11)),
    "only keys rotated": Remapping((_near(5), _far(5, None, lambda m: m + 2))),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that even these sizes come in many blocks, of few heads each."""
    monkeypatch.setattr(block_attention, "_SCORES_ON_CPU", 400)
    monkeypatch.setattr(block_attention, "_MIN_QUERIES", 3)


def brute_force(remapping, rotation, query, key, value, first_query, first_key, scaling, softcap=None, sinks=None):
    """For heads that are not rotated: a query rotated by ρ(n, m)·θ, times the key, for every n and m on its own."""
    group = query.shape[1] // key.shape[1]
    query, key, value = query.double(), *(tensor.double().repeat_interleave(group, 1) for tensor in (key, value))
    queries, keys = first_query + np.arange(query.shape[2]), first_key + np.arange(key.shape[2])
    distances = torch.from_numpy(remapping.distances(queries, keys))
    scores = torch.zeros(*query.shape[:3], key.shape[2], dtype=torch.float64)
    pairs, rotating = len(rotation.inv_freq), set()
    for pair, frequency in enumerate(rotation.inv_freq):
        x, y = (2 * pair, 2 * pair + 1) if rotation.neighbours else (pair, pair + pairs)
        x, y = x + rotation.start, y + rotation.start
        rotating |= {x, y}
        cos, sin = torch.cos(distances * frequency), torch.sin(distances * frequency)
        q1, q2, k1, k2 = query[..., x, None], query[..., y, None], key[..., None, :, x], key[..., None, :, y]
        scores = scores + (q1 * k1 + q2 * k2) * cos.nan_to_num() + (q1 * k2 - q2 * k1) * sin.nan_to_num()
    still = [dimension for dimension in range(query.shape[-1]) if dimension not in rotating]
    scores = (scores + query[..., still] @ key[..., still].transpose(-1, -2)) * scaling
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.exp(scores) * ~distances.isnan()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.double())[:, None, None]
    return (weights / total.where(total > 0, 1.0)) @ value


def make_heads(dtype=torch.float64, batch=2, heads=4, kv_heads=2, head_dim=9, width=5, seed=0, tokens=TOKENS):
    made = torch.Generator().manual_seed(seed)
    shapes = (heads, head_dim), (kv_heads, head_dim), (kv_heads, width)
    return [
        torch.randn(batch, number, tokens, size, generator=made, dtype=torch.float64).to(dtype)
        for number, size in shapes
    ]


def rotate(rotation, states, first=0):
    return rotation.rotate(states, first + np.arange(states.shape[2]))


def attend(kernel, rotation, query, key, value, first_query=0, first_key=0, **options):
    options = {"first_query": first_query, "first_key": first_key, "scaling": 0.4, **options}
    return kernel(rotate(rotation, query, first_query), rotate(rotation, key, first_key), value, **options)


@pytest.mark.parametrize("remapping", REMAPPINGS.values(), ids=REMAPPINGS)
def test_outputs_and_gradients_equal_those_of_brute_force(remapping):
    heads = [tensor.requires_grad_() for tensor in (*make_heads(), SINKS.clone())]
    for rotation in ROTATIONS:
        expected = brute_force(remapping, rotation, *heads[:3], 0, 0, 0.4, 2.0, heads[3])
        result = attend(BlockAttention(remapping, rotation), rotation, *heads[:3], softcap=2.0, sinks=heads[3])
        torch.testing.assert_close(result, expected, atol=1e-11, rtol=0)
        weights = torch.randn_like(result)
        theirs, ours = (torch.autograd.grad((tensor * weights).sum(), heads) for tensor in (expected, result))
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0)
    with torch.no_grad():
        expected = brute_force(remapping, HALVES, *heads[:3], 0, 0, 0.4)
        torch.testing.assert_close(attend(BlockAttention(remapping, HALVES), HALVES, *heads[:3]), expected)


def test_blocks_of_scores_stay_small(monkeypatch):
    """The largest tensor of a call: n × n matrices would be 16 times as large where there are 4 times the tokens."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple | list) else (result,):
                if isinstance(tensor, torch.Tensor):
                    self.numbers = max(self.numbers, tensor.untyped_storage().nbytes() // tensor.element_size())
            return result

    monkeypatch.setattr(block_attention, "_SCORES_ON_CPU", 2**13)
    largest = {}
    for tokens in (256, 1024):
        heads = [torch.randn(1, 2, tokens, 8) for _ in range(3)]
        with Largest() as seen, torch.no_grad():
            attend(BlockAttention(REMAPPINGS["far in groups"], HALVES), HALVES, *heads)
        largest[tokens] = seen.numbers
    assert largest[256] < 2 * 256**2 / 10
    assert largest[1024] <= 4 * largest[256]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("remapping", ["far in groups", "in groups that grow", "chunks"])
def test_fused_kernels_equal_brute_force(remapping, monkeypatch):
    """Their mathematics runs on any device, not fused."""
    monkeypatch.setattr(block_attention, "suits_flex", lambda *_: True)
    query, key, value = make_heads(tokens=300, batch=1)
    kernel = BlockAttention(REMAPPINGS[remapping], HALVES)
    whole = brute_force(kernel.remapping, HALVES, query, key, value, 0, 0, 0.4)
    torch.testing.assert_close(attend(kernel, HALVES, query, key, value), whole, atol=2e-6, rtol=0)
    later = (query[:, :, 170:], key[:, :, 30:], value[:, :, 30:], 170, 30)
    options = {"softcap": 1.5, "sinks": SINKS}
    expected = brute_force(kernel.remapping, HALVES, *later, 0.4, **options)
    torch.testing.assert_close(attend(kernel, HALVES, *later, **options), expected, atol=2e-6, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("remapping", ["far in groups", "first and last"])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)])
def test_cuda_equals_brute_force_forward_and_backward(remapping, dtype, error):
    made = make_heads(tokens=300, batch=1, head_dim=64, width=64)
    heads = [tensor.to("cuda", dtype).requires_grad_() for tensor in made]
    exact = [tensor.detach().double().cpu().requires_grad_() for tensor in heads]
    sinks = SINKS.to("cuda", torch.float32)
    result = attend(BlockAttention(REMAPPINGS[remapping], HALVES), HALVES, *heads, softcap=5.0, sinks=sinks)
    expected = brute_force(REMAPPINGS[remapping], HALVES, *exact, 0, 0, 0.4, 5.0, SINKS)
    torch.testing.assert_close(result.double().cpu(), expected, atol=error, rtol=error)
    weights = torch.randn_like(expected)
    ours = torch.autograd.grad((result * weights.to("cuda", dtype)).sum(), heads)
    for our, their in zip(ours, torch.autograd.grad((expected * weights).sum(), exact), strict=True):
        torch.testing.assert_close(our.double().cpu(), their, atol=4 * error, rtol=4 * error)


def test_a_kernel_that_does_not_compile_falls_back_to_blocks(monkeypatch):
    heads, kernel = make_heads(), BlockAttention(REMAPPINGS["chunks"], HALVES)
    expected = attend(kernel, HALVES, *heads)
    monkeypatch.setattr(block_attention, "suits_flex", lambda *_: True)

    def fails(error):
        def attend_by_flex(*_, **__):
            raise error

        monkeypatch.setattr(block_attention, "attend_by_flex", attend_by_flex)

    for error in (torch._dynamo.exc.FailOnRecompileLimitHit("limit"), torch._dynamo.exc.TorchDynamoException("limit")):
        fails(error)
        with pytest.warns(UserWarning, match="without fused kernels, which is slower: limit"):
            assert torch.equal(attend(kernel, HALVES, *heads), expected)
    fails(torch.OutOfMemoryError("memory"))
    with pytest.raises(torch.OutOfMemoryError):
        attend(kernel, HALVES, *heads)


def test_angles_are_exact_far_out():
    rotation = Rotation(10_000.0 ** -(np.arange(32) / 32))
    by, states = np.array([1e6 + 1 / 3, -(2.0**20) - 0.1]), torch.randn(2, 64)
    angles = torch.from_numpy(by[:, None] * rotation.inv_freq)
    x, y = states.double().chunk(2, -1)
    expected = torch.cat([x * angles.cos() - y * angles.sin(), y * angles.cos() + x * angles.sin()], -1)
    torch.testing.assert_close(rotation.rotate(states, by).double(), expected, atol=1e-6, rtol=0)
