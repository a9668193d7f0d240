"""The llama.cpp command, by llama.cpp's formulas in float32 (test_served.py runs llama-server itself)."""

import math
import shlex

import numpy as np
import pytest

from ropecli.engines.engine_export import export_checkpoint
from ropecli.errors import PatchError

WINDOW, TARGET = 256, 1024
IN_FLAGS = {"none", "linear", "ntk", "dynamic", "ntk-by-parts", "yarn", "yarn with its own attention factor"}
F = np.float32
MSCALE = {
    **{"type": "yarn", "factor": 4.0, "original_max_position_embeddings": WINDOW, "beta_fast": 2, "beta_slow": 1},
    **{"mscale": 1.0, "mscale_all_dim": 1.0},
}


def parsed(command: str) -> dict[str, str]:
    words = shlex.split(command)
    assert words[0] == "llama-server"
    return dict(zip(words[1::2], words[2::2], strict=True))


def turned(flags: dict[str, str], dims: int) -> tuple[np.ndarray, float]:
    """Radians per token, and what multiplies cos and sin, after llama_context, ggml_rope_yarn_corr_dims, rope_yarn."""
    base, scale = F(flags["--rope-freq-base"]), 1 / F(flags.get("--rope-scale", "1"))
    kind, original = flags["--rope-scaling"], int(flags.get("--yarn-orig-ctx", "0"))
    if kind == "none":
        scale = F(1)
    extrapolated = base ** (-np.arange(0, dims, 2, dtype=F) / dims)
    stored = dict(item.split("=") for item in flags.get("--override-kv", "x=y").split(","))
    mscale = float(stored.get("llama.rope.scaling.attn_factor", "float:1").removeprefix("float:"))
    if kind != "yarn":
        return extrapolated * scale, mscale

    def dim(turns: float) -> float:
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    start = max(0, math.floor(dim(float(flags["--yarn-beta-fast"]))))
    end = min(dims - 1, math.ceil(dim(float(flags["--yarn-beta-slow"]))))
    ramp = 1 - np.clip((np.arange(dims // 2) - start) / max(0.001, end - start), 0, 1)
    mix = ramp * float(flags["--yarn-ext-factor"])
    # the context makes attn_factor 1 over this, whatever --yarn-attn-factor says, times what the file stores
    mscale *= 1 + 0.1 * math.log(1 / scale)
    return extrapolated * scale * (1 - mix) + extrapolated * mix, mscale


@pytest.mark.parametrize("patch_name", sorted(IN_FLAGS))
def test_the_flags_make_the_patched_positions(patch_name, patched):
    _, rope, checkpoint = patched(patch_name)
    flags = parsed(export_checkpoint(checkpoint, "llama.cpp").command)
    inv_freq, attention_factor = turned(flags, rope.geometry.rotary_dim)
    np.testing.assert_allclose(inv_freq, rope.inv_freq, rtol=3e-6)
    assert attention_factor == pytest.approx(rope.attention_factor, rel=1e-6)
    assert flags["-c"] == str(TARGET)


@pytest.mark.parametrize("patch_name", ["longrope", "longrope with its own attention factor"])
def test_factors_by_pair_are_refused(patch_name, patched):
    _, rope, checkpoint = patched(patch_name)
    with pytest.raises(PatchError, match="no flag sets a factor per pair") as refused:
        export_checkpoint(checkpoint, "llama.cpp")
    assert f"llama.rope.scaling.attn_factor {rope.attention_factor:.9g}" in str(refused.value)


LINEAR = {"rope_scaling": {"type": "linear", "factor": 4.0}}
KIMI = {"model_type": "kimi_k2", "qk_rope_head_dim": 16, "max_position_embeddings": TARGET, "rope_scaling": MSCALE}


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"model_type": "gemma2"}, f"-c {WINDOW}"),
        ({"model_type": "gemma2", **LINEAR}, f"-c {TARGET}"),
        (KIMI, f"--yarn-beta-fast 2 --yarn-beta-slow 1 -c {TARGET}"),  # a file of deepseek2 does not store the betas
    ],
)
def test_what_flags_do_not_reach_comes_from_the_file(fields, options, config_only):
    """Sliding layers read base and scale from the file, and so does DeepSeek's softmax scale."""
    export = export_checkpoint(config_only(head_dim=32, **fields), "llama.cpp")
    assert export.command == f"llama-server -m model.gguf {options} -np 1"
