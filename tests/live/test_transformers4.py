"""The older dialect, against its reader: transformers 4 builds the plan's rotary tables from what is written.

What that release cannot express is listed here, type by type: there it fails aloud or, in five types, reads no
scaling or only the base. It runs in an environment of its own, which pytest's cache keeps.
"""

import json
import os
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scripts_by_path

from ropecli.attention.patching import patch_to
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.checkpoint.patch_plan import PatchPlan, make_plan
from ropecli.config.families import family_of
from ropecli.errors import RopecliError
from ropecli.live.stock_transformers import quiet_transformers
from ropecli.scaling.spec import ScaledRope

pytestmark = pytest.mark.slow

RELEASE = "4.57.3"
PINNED = ["torch==2.13.0", f"transformers=={RELEASE}", "numpy", "safetensors"]
RUNNER = Path(__file__).with_name("run_transformers4.py")
METHODS = ("yarn", "linear", "ntk", "llama3", "longrope", "ntk-by-parts", "p-rope", "nope")
AGREEING = 710
"""Folders in which every table is the plan's."""

# fmt: off
# Later multimodal types whose language model it knows. families.json marks all other later types as new.
LATER_COMPOSITES = {
    "cosmos3_omni", "fast_vlm", "fun_asr_nano", "glm46v", "glmasr", "glmga", "granite_speech_plus", "kimi_k25",
    "lighton_ocr", "modernvbert", "moss_transcribe_diarize", "pp_chart2table", "qianfan_ocr", "qwen2_5_omni_thinker",
    "qwen3_asr", "qwen3_omni_moe_thinker", "vibevoice_asr", "video_llama_3",
}
# fmt: on
# Whose unpatched config.json, as transformers 5 saves it, is not built either. bamba: of the runner's making.
UNREADABLE = {"bamba", "dbrx", "gemma3n", "granitemoehybrid", "perception_lm", "zamba2"}
NOT_NATIVE = ("yarn", "llama3", "longrope", "ntk-by-parts", "p-rope", "nope")
NOT_BARE = ("yarn", "linear", "llama3", "ntk-by-parts", "p-rope", "nope")
# type -> (methods, part of the error)
ALOUD = {
    "chameleon": ((*NOT_NATIVE, "linear"), "must be a dictionary with with two fields"),
    "mllama": (("ntk",), "'NoneType' object is not subscriptable"),
    "olmo": (NOT_NATIVE, "must be a dictionary with two fields"),
    "olmo2": (NOT_NATIVE, "must be a dictionary with two fields"),
    "phi3": (NOT_BARE, "must be a dictionary with three fields"),  # has no attention factor but longrope's own
    "phi4_multimodal": (NOT_BARE, "must be a dictionary with three fields"),
    "qwen3_vl": (("ntk",), "'NoneType' object has no attribute 'get'"),
    "qwen3_vl_moe": (("ntk",), "'NoneType' object has no attribute 'get'"),
}
# type -> methods
IN_SILENCE = {
    "idefics": METHODS,  # knows neither a base nor a scaling
    "modernbert": METHODS,  # its bases have names of their own, and it knows no scaling
    "modernbert-decoder": METHODS,  # likewise
    "nemotron": tuple(method for method in METHODS if method != "ntk"),  # knows a base and no scaling
    "olmo3": ("ntk",),  # knows one base for all layers
}
coverage = scripts_by_path.load("coverage")


@pytest.fixture(scope="module")
def python(environment) -> Path:
    return environment("transformers4", PINNED)


def with_few_experts(folder: Path) -> Path:
    """Hundreds of experts are modules of their own there, and take minutes to make."""
    config = json.loads((folder / "config.json").read_text())
    most = {"num_experts": 8, "n_routed_experts": 8, "num_local_experts": 8, "moe_num_experts": 8}
    for key, value in {**most, "n_group": 1, "topk_group": 1}.items():
        if isinstance(config.get(key), int):
            config[key] = min(config[key], value)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, dict[str, PatchPlan]]:
    """(where the folders are, the plan of each): TYPE is as transformers 5 saves it, TYPE--METHOD is patched."""
    home, plans = tmp_path_factory.mktemp("transformers4"), {}
    with quiet_transformers():
        for model_type in coverage.all_types():
            if model_type == "evolla":  # has no auto class in transformers 5: the proof, skipped here, refuses it
                continue
            source = open_checkpoint(with_few_experts(coverage.write_checkpoint(model_type, home / model_type)))
            for method in METHODS:
                try:
                    plan = make_plan(source, coverage.spec_of(method, source))
                    patch_to(plan, home / f"{model_type}--{method}", verify=False)
                except RopecliError:  # what is refused is test_all_architectures.py's
                    continue
                plans[f"{model_type}--{method}"] = plan
    return home, plans


@pytest.fixture(scope="module")
def outcomes(python, folders) -> dict[str, Any]:
    """What transformers 4 made of each folder."""
    home, plans = folders
    sources = {name.split("--")[0] for name in plans}
    (home / "job.json").write_text(json.dumps([*sorted(sources), *plans]))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    result = subprocess.run([python, RUNNER, home], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return json.loads((home / "result.json").read_text())


@pytest.fixture(scope="module")
def unknown(folders) -> set[str]:
    """The types that came later."""
    _, plans = folders
    return LATER_COMPOSITES | {name.split("--")[0] for name, plan in plans.items() if family_of(plan.source.config).new}


def agrees(table: dict[str, Any], rope: ScaledRope) -> bool:
    live = np.array(table["inv_freq"])
    if live.shape != rope.inv_freq.shape:
        return False
    allowed = 2e-6 * rope.inv_freq + 2e-7 * rope.geometry.powers() + 1e-25
    same = (np.abs(live - rope.inv_freq) <= allowed).all()
    return bool(same) and table["attention_factor"] == pytest.approx(rope.attention_factor, rel=1e-6)


def label_of(name: str, plan: PatchPlan) -> str | None:
    """The layer type of a table, which transformers 4 tells by the name of its module."""
    if None in plan.positions.ropes:
        return None
    return "sliding_attention" if "local" in name or "sliding" in name else "full_attention"


def test_every_table_is_the_plans_or_is_listed(folders, outcomes):
    _, plans = folders
    agreeing, differing = 0, defaultdict(list)
    for name, plan in plans.items():
        model_type, method = name.split("--")
        tables = outcomes[name].get("tables")
        if not tables:
            continue
        if all(agrees(table, plan.positions.ropes[label_of(key, plan)]) for key, table in tables.items()):
            agreeing += 1
        else:
            differing[model_type].append(method)
    assert differing == {name: list(methods) for name, methods in IN_SILENCE.items()}
    assert agreeing == AGREEING


def test_every_failure_is_an_error_and_is_listed(folders, outcomes, unknown):
    _, plans = folders
    failing = defaultdict(list)
    for name in plans:
        model_type, method = name.split("--")
        if "error" in outcomes[name] and model_type not in unknown | UNREADABLE:
            assert ALOUD[model_type][1] in outcomes[name]["error"]
            failing[model_type].append(method)
    assert failing == {
        name: [method for method in METHODS if method in methods] for name, (methods, _) in ALOUD.items()
    }
