"""Every method's g(m) and h(θ_d), worked out from their text, give its frequencies; targeted ones go by the window."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest

from ropecli.rope import RopeGeometry
from ropecli.scaling.registry import scaling_methods
from ropecli.scaling.scale import scale
from ropecli.scaling.spec import make_spec

GEOMETRY = RopeGeometry(64, 64, 10_000.0, 2048)
PAIRS = np.arange(32)
LISTED = np.geomspace(1, 9, 32)
PARAMETERS = {
    "abf": {"beta": 7.0},
    "custom": {"factors": LISTED.tolist()},
    "longrope": {"long_factor": LISTED.tolist(), "short_factor": (LISTED / 2).tolist()},
}
FREQUENCY_METHODS = [name for name, method in scaling_methods().items() if not method.remaps]

SIGNS = {"·": "*", "^": "**", "θ_d": "θ", "|D|": "D", "2d": "2*d", "long_factor_d": "listed", "b'": "new"}
SIGNS |= {"factors_d": "listed", "2π": "2*π", "⌊": "floor(", "⌋": ")"}
"""From the notation of the texts to Python's; 2d is two by d."""


def value(text: str, **names: object) -> np.ndarray:
    for sign, plain in SIGNS.items():
        text = text.replace(sign, plain)
    known = {"b": 10_000.0, "D": 64, "d": PAIRS, "θ": 10_000.0 ** (-2 * PAIRS / 64), "L": 2048, "listed": LISTED}
    known |= {"max": max, "π": math.pi, "floor": math.floor, "round": np.round}
    return eval(text, {**known, **names})


@pytest.mark.parametrize("method", ["none", "linear", "ntk", "nope", "longrope", "dynamic", "abf", "resonance"])
def test_a_formula_gives_the_frequencies(method):
    """The angle at position 100, over 100, by the two texts."""
    form, s = scaling_methods()[method], 4.0
    g, h = value(form.g, m=100.0, s=s), value(re.split(", (?=or|γ|b')", form.h)[0], s=s, l=8192, new=7.0 * 10_000)
    ours = scale(GEOMETRY, make_spec(method, s, PARAMETERS.get(method, {})), 8192)
    np.testing.assert_allclose(ours.inv_freq, g * h * np.ones(32) / 100, rtol=1e-12)


def test_what_is_targeted_goes_by_the_window():
    """A window twice as long gives other frequencies, at the same factor and the same share of the target."""
    longer = replace(GEOMETRY, original_max_position_embeddings=4096)
    for method in FREQUENCY_METHODS:
        spec = make_spec(method, 4.0, PARAMETERS.get(method, {}))
        same = np.array_equal(scale(GEOMETRY, spec).inv_freq, scale(longer, spec).inv_freq)
        assert scaling_methods()[method].targeted is not same, method
