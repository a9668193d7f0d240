import numpy as np
import pytest

_SHARES = (0.8, 0.9, 1.1, 1.2)
"""Shares of the loss, by document."""


@pytest.fixture(scope="session")
def report():
    """report(ppl at 256, at 512, at 1024, method=..., ...) -> a Report of perplexities."""
    import math

    from ropecli.evaluation.report import Cell, Report

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
            "context_length": round(256 * factor),
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
def changed():
    """changed(report, method, nats at 256, at 512, at 1024) -> the report with each document's loss changed by them."""
    from dataclasses import replace

    def change(report, method, *changes):
        cells = []
        for cell, added in zip(report.cells, changes, strict=True):
            losses = np.array(cell.sums) + np.array(added) * cell.weights
            cells.append(replace(cell, sums=tuple(losses)))
        return replace(report, method=method, factor=4.0, in_memory=True, cells=cells)

    return change


@pytest.fixture(scope="session")
def with_baseline(report):
    """The reports of a base and of its extension, with the same tokens at every length."""
    from dataclasses import replace

    base = report(18.0, 25.0, 47.0, checkpoint="base", digest="b" * 64, task="tail")
    extended = report(20.0, 19.0, 17.0, checkpoint="extended", method="yarn", factor=4.0, task="tail")
    weights = base.cells[0].weights
    return [
        replace(
            one,
            cells=[
                replace(cell, weights=weights, sums=tuple(np.array(cell.sums) * weights / np.array(cell.weights)))
                for cell in one.cells
            ],
        )
        for one in (base, extended)
    ]


@pytest.fixture(scope="session")
def retrieval(report):
    """retrieval({(length, depth or task): hits of 4, ...}, method=..., ...) -> a Report of scores."""
    from ropecli.evaluation.report import score_cell

    def make(hits, checkpoint="folder", window=256, task="needle", trials=4, **others):
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
    from ropecli.evaluation.report import Report, as_json, write_report

    def write(reports, name="report.json"):
        several = reports if isinstance(reports, list) else [reports]
        value = as_json(several) if isinstance(several[0], Report) else reports.as_json()
        write_report(tmp_path / name, value)
        return tmp_path / name

    return write


@pytest.fixture
def tuning():
    """tuning("heads", ...) -> the TuneReport of a made-up run, with these fields replaced. Level heads has gains."""
    import math

    from ropecli.tuning.task import LayerGains, Point, Score, TuneReport

    def score(target, pretraining, documents=3):
        """The score with these perplexities."""
        target, pretraining = math.log(target), math.log(pretraining)
        return Score(target, pretraining, target + 0.25 * pretraining, documents)

    def make(level="heads", **others):
        tried, default, best = {"beta_fast": 14.9}, {}, {"beta_fast": 23.3, "attention_factor": 1.41}
        scored = [(default, 2000, 1500, 2), (tried, 2100, 1550, 2), (best, 1900, 1450, 2)]
        scored += [(best, 1700, 1520, 3), (default, 1900, 1490, 3)]
        points = [Point("grid", "yarn", 2.0, params, score(*losses), 0.5) for params, *losses in scored]
        result = {"score": points[3].score, "learned": 0, "step": 0}
        if level == "heads":
            result = {"score": score(1580, 1480), "learned": 65, "step": 4}
            result["gains"] = [LayerGains("model.layers.0.self_attn.q_proj", [[0.1] * 8] * 2, [[0.0] * 8] * 2)]
            points.append(Point("heads", "yarn", 2.0, best, result["score"], 4.0, step=4, learned=65))
        values = {
            "checkpoint": "base",
            "digest": "0" * 64,
            "level": level,
            "factor": 2.0,
            "original_max_position_embeddings": 64,
            "target_length": 128,
            "source": "text",
            "fingerprint": "3" * 64,
            "dtype": "float32",
            "device": "cpu",
            "command": ["ropecli", "tune", "base", "--data", "text", "--factor", "2", "--level", level],
            "settings": {"level": level, "objective": "ppl", "short_weight": 0.25, "targets": 32},
            "method": "yarn",
            "params": best,
            "attention_factor": 1.41,
            "inv_freq": [10.0 ** (-pair / 2) / 2 for pair in range(8)],
            "pretrained_inv_freq": [10.0 ** (-pair / 2) for pair in range(8)],
            "base": score(1600, 1300),
            "untuned": points[4].score,
            "start": points[3].score,
            "rounding": 0.0,
            "seconds": sum(point.seconds for point in points),
            "points": points,
            "untuned_name": "yarn ×2, nothing tuned",
        }
        return TuneReport(**{**values, **result, **others})

    return make
