"""ropecli: extends the context window of Hugging Face checkpoints with rotary position embeddings.

Every command is a function of the same name and options:
`ropecli.patch("demo", method="yarn", factor=4, output="out")`. Names are imported when they are first used, so
`import ropecli` is fast. For transformers' own `from_pretrained`, `import ropecli.attention` registers the attention of
distance methods.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ropecli.commands import COMMANDS, find_command

if TYPE_CHECKING:
    from ropecli.attention import load_model as load_model
    from ropecli.attention.loaded import check_loaded as check_loaded
    from ropecli.attention.patching import live_patch as live_patch
    from ropecli.checkpoint.opening import open_checkpoint as open_checkpoint
    from ropecli.checkpoint.patch_plan import PatchPlan as PatchPlan
    from ropecli.checkpoint.patch_plan import make_plan as make_plan
    from ropecli.checkpoint.state import CheckpointState as CheckpointState
    from ropecli.checkpoint.state import read_state as read_state
    from ropecli.commands.check_served import check_served as check_served
    from ropecli.commands.env import env as env
    from ropecli.commands.export import export as export
    from ropecli.commands.extend import extend as extend
    from ropecli.commands.finetune import finetune as finetune
    from ropecli.commands.inspect import inspect as inspect
    from ropecli.commands.measure import Reports as Reports
    from ropecli.commands.measure import compare as compare
    from ropecli.commands.measure import eval_ppl as eval_ppl
    from ropecli.commands.measure import needle as needle
    from ropecli.commands.measure import ruler as ruler
    from ropecli.commands.merge import merge as merge
    from ropecli.commands.methods import methods as methods
    from ropecli.commands.patch import patch as patch
    from ropecli.commands.plan import plan as plan
    from ropecli.commands.push import push as push
    from ropecli.commands.recipe import recipe as recipe
    from ropecli.commands.report import report as report
    from ropecli.commands.revert import revert as revert
    from ropecli.commands.theory import theory as theory
    from ropecli.errors import RopecliError as RopecliError
    from ropecli.evaluation.report import Report as Report
    from ropecli.live.loading import load_tokenizer as load_tokenizer
    from ropecli.live.rotary import rotary_tables as rotary_tables
    from ropecli.live.rotary import unpatched_after as unpatched_after
    from ropecli.rope import RopeGeometry as RopeGeometry
    from ropecli.scaling.spec import ScaledRope as ScaledRope
    from ropecli.scaling.spec import ScalingSpec as ScalingSpec
    from ropecli.scaling.spec import make_spec as make_spec
    from ropecli.scaling.spec import scale as scale

_HOMES = {
    # what they take and return, and the mathematics
    "ropecli.checkpoint.state": "CheckpointState read_state",
    "ropecli.checkpoint.patch_plan": "PatchPlan make_plan",
    "ropecli.errors": "RopecliError",
    "ropecli.evaluation.report": "Report",
    "ropecli.commands.measure": "Reports",
    "ropecli.rope": "RopeGeometry",
    "ropecli.scaling.spec": "ScaledRope ScalingSpec make_spec scale",
    # for notebooks: a model patched in memory
    "ropecli.attention": "load_model",
    "ropecli.attention.loaded": "check_loaded",
    "ropecli.attention.patching": "live_patch",
    "ropecli.checkpoint.opening": "open_checkpoint",
    "ropecli.live.loading": "load_tokenizer",
    "ropecli.live.rotary": "rotary_tables unpatched_after",
}
_API = {name: module for module, names in _HOMES.items() for name in names.split()}
__all__ = [*COMMANDS, *_API]


def __getattr__(name: str) -> Any:
    if name in COMMANDS:
        return find_command(name)
    if name in _API:
        return getattr(importlib.import_module(_API[name]), name)
    raise AttributeError(f"module 'ropecli' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *COMMANDS, *_API])
