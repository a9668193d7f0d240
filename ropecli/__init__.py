"""Extends the context window of Hugging Face checkpoints that use rotary position embeddings.

Every command is a function with the same name and options:
`ropecli.patch("demo", method="yarn", factor=4, output="out")`. Names are imported on first use, so `import ropecli`
is cheap. Distance methods need `import ropecli.attention` before transformers' `from_pretrained`.
"""

import importlib
from typing import Any

_COMMANDS = (
    "compare",
    "eval_ppl",
    "export",
    "finetune",
    "inspect",
    "merge",
    "methods",
    "needle",
    "passkey",
    "patch",
    "plan",
    "plot",
    "report",
    "theory",
    "tune",
)
_API = {
    **dict.fromkeys(_COMMANDS, "ropecli.commands"),
    # their argument and result types
    "CheckpointState": "ropecli.checkpoint.state",
    "EvalReport": "ropecli.evaluation.eval_report",
    "PatchPlan": "ropecli.checkpoint.patch_plan",
    "RetrievalReport": "ropecli.evaluation.eval_report",
    "RopeGeometry": "ropecli.rope",
    "RopecliError": "ropecli.errors",
    "ScaledRope": "ropecli.scaling.spec",
    "ScalingSpec": "ropecli.scaling.spec",
    "TuneReport": "ropecli.tuning.tune_report",
    # for notebooks: the mathematics, and patching a model in memory
    "live_patch": "ropecli.attention.patching",
    "load_model": "ropecli.attention",
    "load_tokenizer": "ropecli.live.loading",
    "make_plan": "ropecli.checkpoint.patch_plan",
    "make_spec": "ropecli.scaling.spec",
    "open_checkpoint": "ropecli.checkpoint.opening",
    "read_state": "ropecli.checkpoint.state",
    "rotary_tables": "ropecli.live.rotary",
    "scale": "ropecli.scaling.scale",
    "unpatched_after": "ropecli.attention.patching",
}
__all__ = list(_API)


def __getattr__(name: str) -> Any:
    if name in _API:
        return getattr(importlib.import_module(_API[name]), name)
    raise AttributeError(f"module 'ropecli' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_API])
