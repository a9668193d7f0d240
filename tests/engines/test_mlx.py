"""mlx-lm, by its own code on the CPU: what `export` prints a command for gives transformers' logits.

It runs in an environment of its own, which pytest's cache keeps.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import ropecli
from ropecli.attention.patching import patch_to
from ropecli.checkpoint.state import read_state
from ropecli.engines import mlx
from ropecli.engines.engine_export import export_checkpoint
from ropecli.errors import PatchError

PINNED = ["mlx[cpu]==0.32.4", "mlx-lm==0.32.2", "transformers==5.23.0"]
RUNNER = Path(__file__).with_name("run_mlx.py")
METHODS = {
    "none": {},
    "linear": {},
    "ntk": {},
    "yarn": {"beta_fast": 16.0, "beta_slow": 2.0},
    "llama3": {},
    "longrope": {},
}
# mlx-lm's gemma3 needs a full attention layer as the sixth, its exaone4 a pattern, gpt_neox this width
SIX = {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
SETTINGS = {
    "gemma3_text": {**SIX, "sliding_window_pattern": 6},
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 2, "sliding_window_pattern": None},
    "gpt_neox": {"intermediate_size": 256},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": []},
}
WITH_SECTIONS = {"qwen3_5": ("none", "ntk", "yarn")}  # other scalings drop the sections of multimodal positions
READ = sorted(mlx.READ - {"ministral3"} | {"phi3"})  # ministral3 is scaled as it ships
AGREES, DIFFERS = 5e-3, 0.01


# Scalings as released, in the fields of the release: model_type -> (settings of the tiny model, fields of config.json).
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
MSCALE = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
LONG = np.geomspace(1, 4, 8).tolist()
LONGROPE = {"type": "longrope", "original_max_position_embeddings": 64, "long_factor": LONG, "short_factor": LONG}
LATENT = {
    **{"head_dim": 16, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "v_head_dim": 32},
}
BY_LAYER_TYPE = {**SIX, "sliding_window": 32}
RELEASED = {
    "deepseek_v3": ({**LATENT, "first_k_dense_replace": 2}, {"rope_scaling": MSCALE, "rope_theta": 1e4}),
    "gemma4_text": (BY_LAYER_TYPE, {}),
    "minicpm3": (
        LATENT,
        {"rope_scaling": LONGROPE, "rope_theta": 1e4, "scale_emb": 1, "scale_depth": 1, "dim_model_base": 64},
    ),
    "ministral3": (
        {},
        {"rope_parameters": {**MSCALE, "rope_type": "yarn", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1}},
    ),
    "olmo3": (BY_LAYER_TYPE, {"rope_scaling": {**YARN, "rope_type": "yarn"}, "rope_theta": 5e5}),
}


@pytest.fixture(scope="module")
def folders(build, transformers_logits, tmp_path_factory) -> tuple[Path, dict[str, np.ndarray]]:
    """(folder, logits of stock transformers by name) of each type and method that has a command; type/none for all."""
    home, expected = tmp_path_factory.mktemp("mlx"), {}
    tokens = np.random.default_rng(1).integers(0, 60, 200)
    for model_type in [*READ, *sorted(mlx.BASE_ONLY)]:
        tied = model_type.startswith(("gemma", "cohere"))  # without a head of its own in mlx-lm
        settings = {"head_dim": 32, "tie_word_embeddings": tied, **SETTINGS.get(model_type, {})}
        source = build(model_type, **settings)
        if model_type == "qwen3_moe":  # transformers 5 renames this key when it saves; released configs have it
            config = json.loads((source / "config.json").read_text())
            (source / "config.json").write_text(json.dumps({**config, "num_experts": 4}))
        pairs = read_state(ropecli.open_checkpoint(source)).positions.main.geometry.rotary_dim // 2
        for method in WITH_SECTIONS.get(model_type, METHODS if model_type in READ else ("linear", "ntk")):
            params = {"long_factor": np.geomspace(1, 4, pairs).tolist()} if method == "longrope" else METHODS[method]
            name = f"{model_type}-{method}"
            plan = ropecli.make_plan(
                ropecli.open_checkpoint(source), ropecli.make_spec(method, 1.0 if method == "none" else 4.0, params)
            )
            patch_to(plan, home / name, verify=False)
            np.save(home / name / "tokens.npy", tokens)
            expected[name] = transformers_logits(home / name, tokens)
    for model_type, (settings, fields) in RELEASED.items():
        name = f"{model_type}-released"
        shutil.copytree(build(model_type, **{"head_dim": 32, **settings}), home / name)
        config = json.loads((home / name / "config.json").read_text())
        if "rope_scaling" in fields:
            del config["rope_parameters"]
        (home / name / "config.json").write_text(json.dumps({**config, **fields}))
        np.save(home / name / "tokens.npy", tokens)
        expected[name] = transformers_logits(home / name, tokens)
    return home, expected


@pytest.mark.slow
def test_commands_give_transformers_logits_and_refusals_are_true(folders, environment):
    home, expected = folders
    (home / "job.json").write_text(json.dumps([*expected]))
    python = environment("mlx", PINNED)
    settings = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run([python, RUNNER, home], capture_output=True, text=True, env=settings)
    assert result.returncode == 0, result.stderr
    logits = np.load(home / "logits.npz")
    for name, theirs in expected.items():
        difference = np.abs(logits[name] - theirs).max() / np.abs(theirs).max()
        try:
            export_checkpoint(ropecli.open_checkpoint(home / name), "mlx")
        except PatchError:
            assert difference > DIFFERS, f"{name} is refused and agrees"
        else:
            assert difference < AGREES, f"{name} has a command and differs"
