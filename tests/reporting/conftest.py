import pytest

_SHARES = (0.8, 0.9, 1.1, 1.2)
"""Shares of the loss, by document."""


@pytest.fixture(scope="session")
def report():
    """report(ppl at 256, at 512, at 1024, method=..., ...) -> a Report of perplexities."""
    import math

    from ropecli.evaluation.report import Cell, Report
    from ropecli.evaluation.statistics import Bucket

    def make(
        *ppls, method="none", factor=1.0, params=None, checkpoint="folder", source="demo", shares=_SHARES, **others
    ):
        cells = [
            Cell(
                task="prefix",
                length=length,
                sums=tuple(math.log(ppl) * (length - 1) * share for share in shares),
                weights=(length - 1.0,) * len(shares),
                low=ppl * 0.9,
                high=ppl * 1.1,
                tokens=4 * (length - 1),
                bits_per_byte=math.log2(ppl) / 3,
                by_context=(Bucket(1, 2, 4, 6.0), Bucket(2, 3, 4, 5.0), Bucket(64, 96, 128, math.log(ppl))),
                seconds=2.0,
                tokens_per_second=2.0 * length,
                peak_memory=3 * 2**20,
            )
            for length, ppl in zip((256, 512, 1024), ppls, strict=True)
        ]
        values = {
            "kind": "perplexity",
            "task": "prefix",
            "checkpoint": checkpoint,
            "digest": "0" * 64,
            "method": method,
            "factor": factor,
            "params": params or {},
            "in_memory": False,
            "original_max_position_embeddings": 256,
            "source": source,
            "dtype": "float32",
            "device": "cpu",
            "command": ["ropecli", "eval-ppl", checkpoint, "--data", source],
            "settings": {"stride": None, "chunk": None, "batch_size": 1, "attn": "sdpa", "processes": 1},
            "fingerprint": "1" * 64,
            "cells": cells,
            "document_names": ["a", "b", "c", "d"],
        }
        return Report(**{**values, **others})

    return make


@pytest.fixture(scope="session")
def with_baseline(report):
    """A report with a baseline, a cost of 0% to 2% and a gain."""
    from ropecli.evaluation.report import Change, Headline

    cost = Headline("short-context cost", 256, 256, Change(0.012, 0.003, 0.02))
    gain = Headline("long-context gain", 1024, 256, Change(-0.072, -0.114, -0.037))
    base = report(18.0, 25.0, 47.0, checkpoint="base")
    own = {"method": "yarn", "factor": 4.0, "checkpoint": "extended"}
    return report(20.0, 19.0, 18.5, **own, baseline=base, headlines=[cost, gain])


@pytest.fixture(scope="session")
def retrieval(report):
    """retrieval({(length, depth or task): hits of 4, ...}, method=..., ...) -> a Report of scores."""
    from ropecli.evaluation.report import score_cell

    def make(hits, checkpoint="folder", window=256, task="passkey", trials=4, **others):
        cells = []
        for (length, row), count in hits.items():
            name, depth = (row, None) if isinstance(row, str) else (task, row)
            scores = [True] * count + [False] * (trials - count)
            cells.append(score_cell(name, length, scores, depth=depth, chance=0.1))
        values = {
            "kind": "scores",
            "task": task,
            "checkpoint": checkpoint,
            "original_max_position_embeddings": window,
            "command": ["ropecli", task, checkpoint],
            "settings": {"mode": "generate", "seed": 0},
            "fingerprint": "2" * 64,
            "cells": cells,
            "document_names": [],
        }
        return report(1.0, 1.0, 1.0, **{**values, **others})

    return make


@pytest.fixture
def written(tmp_path):
    """written(report or list of them, name=...) -> the JSON file that holds it."""
    from ropecli.evaluation.report import write_report

    def write(reports, name="report.json"):
        value = [one.as_json() for one in reports] if isinstance(reports, list) else reports.as_json()
        write_report(tmp_path / name, value)
        return tmp_path / name

    return write


@pytest.fixture
def tuning():
    """tuning("heads", points=24, layers=4, ...) -> a TuneReport; the numbers are made up, the frequencies yarn's."""
    import math

    import numpy as np

    from ropecli.rope import RopeGeometry
    from ropecli.scaling.scale import scale
    from ropecli.scaling.spec import make_spec
    from ropecli.tuning.task import LayerGains, Point, Score, TuneReport

    def score(target, pretraining, documents=16):
        target, pretraining = math.log(target), math.log(pretraining)
        return Score(target, pretraining, target + 0.25 * pretraining, documents)

    def make(level="heads", points=24, layers=4, **others):
        random, geometry = np.random.default_rng(0), RopeGeometry(32, 32, 1e4, 256)
        params, first = {"beta_fast": 8.0, "beta_slow": 0.5}, "search" if level == "search" else "grid"
        # the second half on all documents, but of a search
        documents = [4 if level == "search" or 2 * index < points - 1 else 16 for index in range(points)]
        tried = [
            Point(first, "yarn", 4.0, params, score(14.3 + random.gamma(1.5), 14.4 + random.gamma(1.5), count), 0.6)
            for count in documents
        ]
        learned = {"heads": 2 * layers * 4 * 16 + 1, "lora": 12288}.get(level, 0)
        for step in range(10, 101, 10) if learned else ():
            reached = score(13.2 + 1.1 * math.exp(-step / 30), 13.9 + 0.5 * math.exp(-step / 40))
            tried.append(Point(level, "yarn", 4.0, params, reached, 9.8, step=step, learned=learned))
        names = [f"model.layers.{index}.self_attn.q_proj" for index in range(layers if level == "heads" else 0)]
        gains = [
            LayerGains(name, random.normal(0, 0.2, (4, 16)).tolist(), random.normal(0, 0.3, (4, 16)).tolist())
            for name in names
        ]
        report = {
            "checkpoint": "demo",
            "digest": "0" * 64,
            "level": level,
            "factor": 4.0,
            "original_max_position_embeddings": 256,
            "target_length": 1024,
            "source": "demo-train",
            "fingerprint": "3" * 64,
            "dtype": "float32",
            "device": "cpu",
            "command": ["ropecli", "tune", "demo", "--level", level],
            "settings": {"level": level, "methods": ["yarn"], "short_weight": 0.25},
            "method": "longrope" if level == "search" else "yarn",
            "params": params,
            "attention_factor": 1.12,
            "inv_freq": scale(geometry, make_spec("yarn", 4.0, params)).inv_freq.tolist(),
            "pretrained_inv_freq": geometry.inv_freq().tolist(),
            "base": score(47.03, 13.55),
            "untuned": score(14.91, 15.47),
            "untuned_name": "yarn ×4, nothing tuned",
            "start": score(14.31, 14.43),
            "score": tried[-1].score if learned else score(14.31, 14.43),
            "learned": learned,
            "step": 100 if learned else 0,
            "rounding": 0.0,
            "seconds": sum(point.seconds for point in tried),
            "points": tried,
            "gains": gains,
            "log_temperature": -0.03 if gains else 0.0,
            "environment": {"ropecli": "0.1", "torch": "2.9"},
        }
        return TuneReport(**{**report, **others})

    return make
