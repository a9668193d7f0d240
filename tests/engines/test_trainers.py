"""The config files for trainers; TRL's is loaded by its own code, and the rotary tables are the patch's.

It runs in an environment of its own, which pytest's cache keeps; what is not pinned there comes from this one.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tiny_settings import ONE_OF_EACH

import ropecli
from ropecli.attention.patching import patch_to
from ropecli.engines.engine_export import export_checkpoint
from ropecli.errors import PatchError

TRAINERS = ("axolotl", "llama-factory", "ms-swift", "trl", "unsloth")
RUNNER = Path(__file__).with_name("run_trl.py")
PINNED = {"trl": ["trl==1.16.0"]}
YARN = {"attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0}
LONGROPE = {"long_factor": np.geomspace(1, 8, 8).tolist(), "attention_factor": 1.1}
PATCHES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {  # model type, settings, method, parameters
    "llama-yarn": ("llama", {}, "yarn", YARN),
    "llama-llama3": ("llama", {}, "llama3", {}),
    "llama-ntk": ("llama", {}, "ntk", {}),
    "phi-longrope": ("phi", {}, "longrope", LONGROPE),
    "gemma3_text-linear": ("gemma3_text", ONE_OF_EACH, "linear", {}),
}


def flat(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of all sections."""
    return {
        k: v for key, value in fields.items() for k, v in (value if isinstance(value, dict) else {key: value}).items()
    }


TEXT: dict[str, Any] = {"capture_output": True, "text": True}


@pytest.mark.parametrize("engine", TRAINERS)
def test_the_file_has_the_checkpoint_and_its_length_and_nothing_of_rope(engine, patched):
    folder, _, checkpoint = patched("yarn")
    export = export_checkpoint(checkpoint, engine)
    written = yaml.safe_load(export.file_text)
    assert written == export.overrides
    fields = flat(written)
    assert [value for value in fields.values() if value in (str(folder), 1024)] == [str(folder), 1024]
    assert not [key for key in fields if "rope" in key or "position" in key]


@pytest.mark.parametrize("engine", TRAINERS)
def test_a_distance_method_is_trained_by_ropecli_only(engine, llama, tmp_path):
    plan = ropecli.make_plan(ropecli.open_checkpoint(llama), ropecli.make_spec("rerope", 4.0))
    patch_to(plan, tmp_path / "rerope", verify=False)
    with pytest.raises(PatchError, match=r"uses rerope.* `ropecli finetune`"):
        export_checkpoint(ropecli.open_checkpoint(tmp_path / "rerope"), engine)


@pytest.fixture(scope="module")
def run(environment, tmp_path_factory):
    """run(engine, words) -> a process in the engine's environment, in a folder of its own."""

    def start(engine: str, *words: object, cwd: Path) -> None:
        python = environment(engine, PINNED[engine], "--no-deps")
        site = subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], **TEXT).stdout
        paths = [site.strip(), *(entry for entry in sys.path if "site-packages" in entry)]
        settings = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
        result = subprocess.run([python, "-W", "ignore", *words], env={**os.environ, **settings}, cwd=cwd, **TEXT)
        assert result.returncode == 0, result.stderr[-3000:]

    return start


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trainers") / "texts"
    folder.mkdir()
    rows = [{"text": f"Chapter {number}. Call me Ishmael."} for number in range(12)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def plans(build, tmp_path_factory) -> dict[str, tuple[Any, Path]]:
    """By name of PATCHES: the plan and the folder that it wrote."""
    made = {}
    for name, (model_type, settings, method, params) in PATCHES.items():
        source = ropecli.open_checkpoint(build(model_type, **settings))
        plan = ropecli.make_plan(source, ropecli.make_spec(method, 4.0, params))
        made[name] = plan, tmp_path_factory.mktemp("trained") / name
        patch_to(plan, made[name][1], verify=False)
    return made


@pytest.mark.slow
def test_trl_loads_the_patch(plans, run, texts):
    home = texts.parent
    for name, (_, folder) in plans.items():
        (home / f"{name}.yaml").unlink(missing_ok=True)
        export_checkpoint(ropecli.open_checkpoint(folder), "trl", home / f"{name}.yaml")
    (home / "job.json").write_text(json.dumps([*plans]))
    run("trl", RUNNER, home, cwd=home)
    results = json.loads((home / "result.json").read_text())
    for name, (plan, _) in plans.items():
        tables = results[name]["tables"]
        assert set(tables) == {label or "" for label in plan.positions.ropes}, name
        for label, rope in plan.positions.ropes.items():
            table = tables[label or ""]
            np.testing.assert_allclose(table["inv_freq"], rope.inv_freq, rtol=1e-6, atol=1e-12, err_msg=name)
            assert table["attention_factor"] == pytest.approx(rope.attention_factor, rel=1e-6), name
        assert results[name]["max_length"] == plan.positions.context_length
        assert results[name]["packing"] < 1e-4, name


@pytest.mark.slow
def test_the_callback_in_trl_with_peft_and_liger(plans, run, texts):
    home, (_, folder) = texts.parent, plans["llama-yarn"]
    run("liger", RUNNER.with_name("run_sft.py"), folder, home, cwd=home)
    checks = json.loads((home / "checks.json").read_text())
    compared = "1 rotary tables and 2 attention layers were compared."
    for name in ("as it is", "bfloat16", "Liger"):  # at the start and after the first step
        assert checks[name].count(compared) == 2, checks[name]
    assert "unscaled frequencies" in checks["unscaled"]
    assert "rope_parameters.factor is 2.0, not 4.0" in checks["factor"]
