"""Level 0: the best constants of one method or several, by forward passes alone."""

from functools import cache

from ropecli.checkpoint.patch_plan import PatchPlan
from ropecli.tuning.halving import halve
from ropecli.tuning.run import Run, try_plan
from ropecli.tuning.space import own_constants, points


def search_constants(run: Run) -> PatchPlan:
    """The plan that the judge likes best, of all methods, each with its share of the points; the model stays as it was.

    The first constants that are a method's own are measured on all documents whatever becomes of them: what the others
    are held against. Raises MethodError, PatchError.
    """
    settings, geometry = run.settings, run.settings.geometry(run.checkpoint)
    share = settings.points // len(settings.methods)
    specs = [spec for one in settings.methods for spec in points(geometry, one, run.factor, share, settings.seed)]
    plans = [settings.plan(run.checkpoint, spec) for spec in specs]

    @cache
    def measure(index: int, count: int) -> float:
        return try_plan(run, plans[index], f"grid {specs[index]}", count, level="grid")

    count = len(run.judge.documents.kept)
    best = halve(range(len(plans)), count, measure)[0]
    return plans[min((best, own_constants(specs)), key=lambda index: measure(index, count))]
