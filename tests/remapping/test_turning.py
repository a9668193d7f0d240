"""Turning heads, against multiplication of complex numbers and against transformers."""

import numpy as np
import pytest
import torch

from ropecli.remapping.attention.tables import TurnTable
from ropecli.remapping.attention.turning import Rotation

INV_FREQ = 10_000.0 ** -(np.arange(4) / 4)


def turned(states: torch.Tensor, by: np.ndarray, rotation: Rotation) -> torch.Tensor:
    """Every pair as a complex number, multiplied by e^(i·by·θ)."""
    result = states.double().numpy().copy()
    pairs = len(rotation.inv_freq)
    for pair, frequency in enumerate(rotation.inv_freq):
        if rotation.neighbours:
            real, imaginary = rotation.start + 2 * pair, rotation.start + 2 * pair + 1
        else:
            real, imaginary = rotation.start + pair, rotation.start + pair + pairs
        number = (result[..., real] + 1j * result[..., imaginary]) * np.exp(1j * by * frequency)
        result[..., real], result[..., imaginary] = number.real, number.imag
    return torch.from_numpy(result)


@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize("start", [0, 3])
def test_each_pair_turns_by_its_own_angle_and_nothing_else_does(start, neighbours):
    rotation = Rotation(INV_FREQ, start, neighbours)
    states = torch.randn(2, 3, 7, 13, dtype=torch.float64)
    by = np.linspace(-40.5, 90, 7)
    result = rotation.turn(states, by)
    torch.testing.assert_close(result, turned(states, by, rotation), atol=1e-13, rtol=0)
    still = [*range(start), *range(start + 8, 13)]
    assert torch.equal(result[..., still], states[..., still])


def test_angles_are_exact_far_out():
    rotation = Rotation(10_000.0 ** -(np.arange(32) / 32))
    by = np.array([1e6 + 1 / 3, -(2.0**20) - 0.1])
    states = torch.randn(2, 64)
    torch.testing.assert_close(rotation.turn(states, by).double(), turned(states, by, rotation), atol=1e-6, rtol=0)


def test_turning_is_what_transformers_does():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=16))
    states = torch.randn(1, 4, 30, 16)
    cos, sin = rotary(states, torch.arange(30)[None])
    theirs, _ = apply_rotary_pos_emb(states, states, cos, sin)
    ours = Rotation(10_000.0 ** -(np.arange(8) / 8)).turn(states, np.arange(30.0))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_a_table_made_in_inference_serves_training():
    table = TurnTable(np.zeros_like, Rotation(INV_FREQ))
    with torch.inference_mode():
        table.turn(torch.randn(5, 8), 0)
    states = torch.randn(5, 8, requires_grad=True)
    table.turn(states, 0).square().sum().backward()
    torch.testing.assert_close(states.grad, 2 * states.detach(), atol=1e-5, rtol=0)
