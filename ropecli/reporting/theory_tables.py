"""The tables of `ropecli theory`, from the report of checkpoint/inspection.py.

Methods are shown in YaRN's general form f(x, g(m), h(θ_d)) (arXiv:2309.00071, eq. 12). The band limits, 32 and 1
rotations, are its beta_fast and beta_slow (section 3.2).
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from ropecli.analysis.score import LONGEST
from ropecli.reporting.wording import tokens
from ropecli.scaling.registry import find_method
from ropecli.table import Table

Rope = dict[str, Any]
"""One of the report's ropes: the summary of analysis/summary.py, with its name and form."""
_BANDS = {"32 or more": (32, math.inf), "8 to 32": (8, 32), "1 to 8": (1, 8), "below 1": (0, 1)}
_SAME = 1e-9
_DECAY = {
    "score": "score",
    "magnitude": "|mean|",
    "estimate": "integral",
    "bound": "O(1/t)",
    "sinusoidal": "sinusoidal",
}


def theory_tables(report: dict[str, Any]) -> list[Table]:
    """report: of study_report."""
    pretrained, *methods = report["ropes"]
    tables = [_quantities(report), _bands(pretrained, methods), *_decay([pretrained, *methods][-1])]
    return [_forms(methods), *tables] if methods else tables


def _forms(methods: Sequence[Rope]) -> Table:
    """How each method changes a position m and a pair's frequency θ_d. Distance methods have neither g nor h."""
    rows = [
        [rope["name"], rope["g"], rope["h"] if rope["g"] else _DISTANCES, rope["interpolation"]] for rope in methods
    ]
    title = "scaling of a position m and of a pair's frequency θ_d: f(x, g(m), h(θ_d))"
    return Table(title, ["method", "g(m)", "h(θ_d)", "interpolation"], rows, names=4)


_DISTANCES = "unchanged: the method changes distances"


def _quantities(report: dict[str, Any]) -> Table:
    """A column for each rope."""
    ropes, target, base = report["ropes"], report["target_length"], report["smallest_base"]
    pretrained = ropes[0]
    original_length, before = pretrained["original_max_position_embeddings"], pretrained["granularity"]
    slow = [pair for pair, rotations in enumerate(pretrained["turns_in_window"]) if 0 < rotations < 1 - _SAME]
    compared = {
        "slow pairs at unseen angles": [f"{_unseen(rope, pretrained, slow)} of {len(slow)}" for rope in ropes],
        "of the pretrained granularity": [f"{rope['granularity'] / before:.0%}" if before > 0 else "" for rope in ropes],
    }
    ...
