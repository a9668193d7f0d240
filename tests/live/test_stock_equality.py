"""The promise: what `patch` writes, stock transformers runs as ropecli's own mathematics say, without ropecli."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from ropecli.attention.patching import live_patch, patch_to
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.checkpoint.patch_plan import PatchPlan, make_plan
from ropecli.scaling.registry import scaling_methods
from ropecli.scaling.spec import make_spec

LENGTH = 150  # past the pretraining length, 64, and inside the patched one, 256
TOKENS = np.random.default_rng(7).integers(1, 512, LENGTH)

SHORT = np.linspace(1.0, 1.3, 16).tolist()
LONG = np.linspace(1.0, 6.0, 16).tolist()

CASES = {
    "none": ("none", {}),
    "unscaled": ("unscaled", {}),
    "linear": ("linear", {}),
    "ntk": ("ntk", {}),
    "dynamic": ("dynamic", {}),
    "abf-beta": ("abf", {"beta": 50.0}),
    "ntk-by-parts": ("ntk-by-parts", {}),
    "llama3": ("llama3", {}),
    "longrope-two-lists": ("longrope", {"long_factor": LONG, "short_factor": SHORT, "attention_factor": 1.1}),
    "p-rope": ("p-rope", {"p": 0.5}),
    "nope": ("nope", {}),
    "custom-frequencies": ("custom", {"inv_freq": [0.5**index for index in range(15)] + [0.0]}),
    "yarn": ("yarn", {}),
    "cope": ("cope", {}),
    "resonance": ("resonance", {}),
    "yarn+resonance": ("yarn+resonance", {}),
    "abf+cope": ("abf+cope", {"beta": 5.0, "clipped_pairs": 4}),
    "yarn-whole-ramp": ("yarn", {"truncate": False, "beta_fast": 8.0, "beta_slow": 0.5}),
}

# Runs where `import ropecli` fails: tokens, folders -> output.npz with the logits of each.
STOCK = """
import sys
assert "ropecli" not in sys.modules
sys.modules["ropecli"] = None
import numpy as np, torch
from transformers import AutoModelForCausalLM
ids = torch.from_numpy(tokens)[None]
logits = {}
for folder in folders:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits[folder] = model(input_ids=ids, use_cache=False).logits[0].numpy()
np.savez(output, **logits)
"""


@pytest.fixture(scope="module")
def plans(llama) -> dict[str, PatchPlan]:
    return {
        name: make_plan(open_checkpoint(llama), make_spec(method, 4.0, params))
        for name, (method, params) in CASES.items()
    }


@pytest.fixture(scope="module")
def stock_logits(plans, llama, tmp_path_factory, fork) -> dict[str, np.ndarray]:
    """By case, the logits that a process without ropecli gets from the written folder."""
    home = tmp_path_factory.mktemp("stock")
    for name, plan in plans.items():
        patch_to(plan, home / name, verify=False)  # the proof has tests of its own: here the logits are the proof
    folders = {"unpatched": llama, **{name: home / name for name in plans}}
    words = {"tokens": TOKENS, "folders": list(map(str, folders.values())), "output": home / "logits.npz"}
    process = fork(exec, STOCK, words)
    assert process.wait() == 0, process.communicate()
    logits = np.load(home / "logits.npz")
    return {name: logits[str(folder)] for name, folder in folders.items()}


@pytest.fixture
def base_model(llama) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()


def logits_of(model: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(TOKENS)[None], use_cache=False).logits[0].numpy()


def test_every_method_that_stock_software_has_is_a_case():
    live_only = {
        name
        for name, method in scaling_methods().items()
        if (not method.rope_type and method.depends_on_length) or method.remaps
    }
    assert {method for method, _ in CASES.values() if "+" not in method} == set(scaling_methods()) - live_only


@pytest.mark.parametrize("name", CASES)
def test_stock_logits_are_those_of_the_live_patch(name, plans, stock_logits, base_model):
    live_patch(base_model, plans[name].positions.ropes)
    np.testing.assert_allclose(stock_logits[name], logits_of(base_model), rtol=0, atol=1e-4)


def test_no_two_cases_give_the_same_logits(stock_logits):
    names = sorted({"unpatched", *CASES} - {"none", "unscaled"})
    for index, first in enumerate(names):
        for second in names[index + 1 :]:
            assert np.abs(stock_logits[first] - stock_logits[second]).max() > 1e-4, (first, second)
