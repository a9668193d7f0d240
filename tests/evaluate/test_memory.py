"""The peak of a stretch of work is that stretch's, and forgotten before the next."""

import sys

import numpy as np
import pytest
import torch

from ropecli.evaluate.memory import peak_memory, reset_peak

MANY = 128 * 2**20
CPU = torch.device("cpu")


def test_the_peak_is_in_bytes_and_holds_what_was_given_back():
    reset_peak(CPU)
    before = peak_memory(CPU)
    block = np.ones(MANY, dtype=np.uint8)
    assert block[-1] == 1
    del block
    assert peak_memory(CPU) >= before + 0.8 * MANY


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere a process's peak only grows")
def test_a_peak_before_the_reset_does_not_count():
    block = np.ones(MANY, dtype=np.uint8)
    high = peak_memory(CPU)
    del block
    reset_peak(CPU)
    assert peak_memory(CPU) < high - 0.8 * MANY
