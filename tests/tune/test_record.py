"""A tuning's record: plain values, read where no model library is."""

import dataclasses
import json

from ropecli.rope import ScalingSpec
from ropecli.tune.record import Point, Score


def test_a_point_is_labelled_by_its_numbers():
    score = Score(2.0, 1.5, 2.375, 4)
    assert Point("grid", "yarn", 4.0, {}, score, 1.0).label == "yarn ×4"
    point = Point("grid", "yarn", 4.0, {"beta_fast": 8.25, "beta_slow": 0.5, "other": [1.0, 2.0]}, score, 1.0)
    assert point.label == "yarn ×4 (beta_fast 8.25, beta_slow 0.5)"
    assert json.loads(json.dumps(dataclasses.asdict(point)))["score"]["objective"] == 2.375


def test_a_point_is_of_a_plan(llama):
    from ropecli.checkpoint.plan import make_plan
    from ropecli.checkpoint.reading import open_checkpoint

    plan = make_plan(open_checkpoint(llama), ScalingSpec("yarn", 2.0, {"beta_fast": 16.0}))
    point = Point.of(plan, Score(2.0, 1.5, 2.375, 4), 3.0, "heads", step=10, learned=7)
    assert (point.level, point.method, point.factor, point.params) == ("heads", "yarn", 2.0, {"beta_fast": 16.0})
    assert (point.step, point.learned, point.seconds) == (10, 7, 3.0)
