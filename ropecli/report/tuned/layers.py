"""Learned gains and phases as arrays, layer by layer, and how much each layer changed."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ropecli.errors import DataError
from ropecli.report.wording import clean
from ropecli.tune.record import LayerGains, TuneReport


@dataclass(frozen=True)
class Layer:
    """log_gain, phase (radians): shape (heads, pairs), float64; phase is None where all heads share a norm, and then
    heads is 1.
    """

    name: str
    log_gain: np.ndarray
    phase: np.ndarray | None

    @property
    def change(self) -> float:
        """Mean |log gain + i·phase|: how far the complex gain is from 1."""
        turned = 0.0 if self.phase is None else self.phase
        return float(np.hypot(self.log_gain, turned).mean())


def layers_of(reports: Sequence[TuneReport]) -> list[Layer]:
    """Of the one report. Raises DataError for several, and for one that learned no gains."""
    if len(reports) > 1:
        raise DataError(f"--kind gains draws one tuning run, and {len(reports)} were given. Give one.")
    (report,) = reports
    if not report.gains:
        heads = report.level == "heads"
        why = "heads found nothing better than none" if heads else f"level {clean(report.level, 20)} learns none"
        instead = "Use --kind tuning." if heads else "Tune with `ropecli tune --level heads`, or use --kind tuning."
        raise DataError(f"The report of {clean(report.checkpoint)} has no gains: {why}. {instead}")
    names = _names([one.name for one in report.gains])
    return [_layer(name, one) for name, one in zip(names, report.gains, strict=True)]


def _layer(name: str, gains: LayerGains) -> Layer:
    return Layer(name, np.array(gains.log_gain), np.array(gains.phase) if any(gains.phase) else None)


def _names(modules: Sequence[str]) -> list[str]:
    """The layers' own numbers, where each module's name has one and no two the same; else their places."""
    found = [re.search(r"(?:^|\.)(\d{1,4})(?:\.|$)", name) for name in modules]
    numbers = [match[1] for match in found if match]
    return numbers if len(set(numbers)) == len(modules) else [f"{place}" for place in range(len(modules))]
