"""What holds of the methods for every geometry and factor."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ropecli.errors import MethodError
from ropecli.rope import RopeGeometry
from ropecli.scaling.scale import scale
from ropecli.scaling.spec import make_spec

few = settings(max_examples=25, deadline=None)
factors = st.floats(1.0, 1000.0)


@st.composite
def geometries(draw, still: bool = True) -> RopeGeometry:
    """At least two pairs rotate; at least a quarter of all, since NTK's base grows with s to the power d/2k."""
    pairs = draw(st.integers(2, 128))
    at_most = min(pairs - 2, 3 * pairs // 4) if still else 0
    theta = draw(st.floats(math.log(2), math.log(1e8)).map(math.exp))
    window = round(2 ** draw(st.floats(4, 20)))
    head_dim = draw(st.sampled_from([2 * pairs, 256]))
    return RopeGeometry(head_dim, 2 * pairs, theta, window, still_pairs=draw(st.integers(0, at_most)))


@few
@given(geometry=geometries(), factor=factors, fast=st.floats(0.1, 1e4), spread=st.floats(1.01, 1e3))
def test_yarn_stays_between_none_and_linear_or_is_refused(geometry, factor, fast, spread):
    base = geometry.inv_freq()
    count = base * geometry.original_max_position_embeddings / (2 * math.pi)
    for truncate in (True, False):
        params = {"beta_fast": fast, "beta_slow": fast / spread, "truncate": truncate}
        try:
            inv_freq = scale(geometry, make_spec("yarn", factor, params)).inv_freq
        except MethodError:
            rotating = count[count > 0]
            assert (rotating < fast / spread * (1 + 1e-9)).all() or (rotating > fast * (1 - 1e-9)).all()
        else:
            assert (inv_freq <= base * (1 + 1e-9)).all()
            assert (inv_freq >= base / factor * (1 - 1e-9)).all()
            slowed = inv_freq[base > 0] / base[base > 0]
            assert (np.diff(slowed) <= 1e-9).all()
