import numpy as np
import pytest

_SHARES = (0.8, 0.9, 1.1, 1.2)
"""Shares of the loss, by document."""


@pytest.fixture(scope="session")
def report():
    """report(ppl at 256, at 512, at 1024, method=..., ...) -> a Report of perplexities."""
    import math

    from ropecli.evaluation.kinds import KINDS
    from ropecli.evaluation.report import Cell

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
            )
            for length, ppl in zip((256, 512, 1024), ppls, strict=True)
        ]
        values = {
            "task": "prefix",
            "checkpoint": checkpoint,
            "weights": "0" * 64,
            "scaling": f"{method} {factor:g} {params}",
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
        values |= others
        return KINDS[values["task"]](**values)

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
        return replace(report, method=method, scaling=method, factor=4.0, in_memory=True, cells=cells)

    return change


@pytest.fixture(scope="session")
def with_baseline(report):
    """The reports of a base and of its extension, with the same tokens at every length."""
    from dataclasses import replace

    base = report(18.0, 25.0, 47.0, checkpoint="base", weights="b" * 64, task="tail")
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
    from ropecli.evaluation.kinds import as_json
    from ropecli.evaluation.report import write_report

    def write(reports, name="report.json"):
        write_report(tmp_path / name, as_json(reports if isinstance(reports, list) else [reports]))
        return tmp_path / name

    return write
