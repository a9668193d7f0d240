"""Every draw of chance in the data: from the seed, what it is for, and numbers; never from what was drawn before."""

import zlib

import numpy as np


def generator(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """The same for the same arguments, and independent of all others."""
    return np.random.default_rng([seed, zlib.crc32(purpose.encode()), *numbers])
