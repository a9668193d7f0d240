"""The commands: one function each, with the command's name and options, callable from Python.

They import model libraries when they run. Names, types, defaults and help of the command line come from their
signatures.
"""

from ropecli.commands.check_served import check_served
from ropecli.commands.export import export
from ropecli.commands.extend import extend
from ropecli.commands.finetune import finetune
from ropecli.commands.inspect import inspect
from ropecli.commands.measure import compare, eval_ppl, needle, passkey, ruler
from ropecli.commands.merge import merge
from ropecli.commands.methods import methods
from ropecli.commands.patch import patch
from ropecli.commands.plan import plan
from ropecli.commands.plot import plot
from ropecli.commands.push import push
from ropecli.commands.recipe import recipe
from ropecli.commands.report import report
from ropecli.commands.revert import revert
from ropecli.commands.theory import theory
from ropecli.commands.tune import tune

__all__ = [
    "check_served",
    "compare",
    "eval_ppl",
    "export",
    "extend",
    "finetune",
    "inspect",
    "merge",
    "methods",
    "needle",
    "passkey",
    "patch",
    "plan",
    "plot",
    "push",
    "recipe",
    "report",
    "revert",
    "ruler",
    "theory",
    "tune",
]
