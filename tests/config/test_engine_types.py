"""rope_types that only engines know are read as what the engines compute; a patch writes transformers' own names."""

import numpy as np
import pytest
from tiny_settings import TINY

from ropecli.checkpoint.inspection import inspect_checkpoint
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.checkpoint.state import read_state
from ropecli.engines.engine_export import export_checkpoint
from ropecli.errors import PatchError

WIDTH, BASE, FACTOR = 32, 1e4, 4.0
LLAMA = {**TINY, "model_type": "llama", "head_dim": WIDTH, "rope_theta": BASE, "max_position_embeddings": 256}
PAIRS = np.arange(WIDTH // 2)
PLAIN = BASE ** (-2 * PAIRS / WIDTH)
YARN = {"factor": FACTOR, "original_max_position_embeddings": 64}
AXES = {"mrope_section": [4, 6, 6]}
TYPES = {  # its fields, the method that it is read as, frequencies if they are not yarn's, attention factor
    "deepseek_yarn": ({**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "yarn", None, 1.0),
    # as vLLM 0.33.0 computes it: of the base b * s, divided by s^(2/d)
    "ntk": ({"factor": FACTOR}, "longrope", (BASE * FACTOR) ** (-2 * PAIRS / WIDTH) / FACTOR ** (2 / WIDTH), 1.0),
    "bailing_mrope": (AXES, "none", PLAIN, 1.0),
}


@pytest.mark.parametrize("name", TYPES)
def test_an_engines_type_is_read_exported_and_patched(name, written, ropecli, tmp_path):
    fields, method, frequencies, attention_factor = TYPES[name]
    folder = written({**LLAMA, "rope_scaling": {"type": name, **fields}})
    state = read_state(open_checkpoint(folder))
    rope = state.positions.main
    expected = read_state(open_checkpoint(written({**LLAMA, "rope_scaling": {"type": "yarn", **YARN}}))).positions.main
    np.testing.assert_allclose(rope.inv_freq, expected.inv_freq if frequencies is None else frequencies, rtol=1e-12)
    assert (rope.spec.method.name, rope.attention_factor) == (method, pytest.approx(attention_factor))
    findings = {finding["rule"]: finding for finding in inspect_checkpoint(state)["findings"]}
    assert f"transformers has no rope_type {name!r}" in findings["engine-type"]["message"]
    assert export_checkpoint(open_checkpoint(folder), "vllm").command
    output = tmp_path / "fixed"
    options = ["--factors-file", folder / "config.json"] if method == "longrope" else []
    options += ["--factor", 4] if method != "none" else []
    patched = ropecli("patch", folder, "--method", method, *options, "--output", output)
    assert "not proved: that ropecli reads the original config.json as transformers does" in patched.said
    rules = {finding["rule"] for finding in inspect_checkpoint(read_state(open_checkpoint(output)))["findings"]}
    assert (patched.code, "engine-type" in rules) == (0, False)


def test_an_engine_that_does_not_know_the_type_is_not_advised(written):
    folder = written({**LLAMA, "rope_scaling": {"type": "ntk", "factor": FACTOR}})
    with pytest.raises(
        PatchError, match=r"it does not know the rope_type in config\.json\. Write another: ropecli patch"
    ):
        export_checkpoint(open_checkpoint(folder), "mlx")
