"""Level 1: a gain and a phase of each query head and rotary pair, and one temperature, folded into the weights."""

from ropecli.checkpoint.patch_plan import PatchPlan
from ropecli.tuning.gains import HeadGains
from ropecli.tuning.record import Score
from ropecli.tuning.run import Run, Tuned, finish_learned, train

_RATES = (0.03, 0.003)
"""Of gains and phases, and of the temperature."""


def tune_heads(run: Run, plan: PatchPlan, begun: Score) -> Tuned:
    """Raises PatchError where nothing could be folded."""
    gains = HeadGains(run.model, plan.scaled)
    groups = [[*gains.log_gain, *(phase for phase in gains.phase if phase.numel())], [gains.log_temperature]]
    with gains.live(run.model):
        best, live = train(run, plan, begun, groups, _RATES)
    learned = {"gains": gains.as_record(), "log_temperature": float(gains.log_temperature.detach())}
    return finish_learned(run, plan, begun, best, live, gains.folded(run.model), **learned)
