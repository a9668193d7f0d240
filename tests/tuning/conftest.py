"""Runs of tiny models on a few short documents, in this process, in float32."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

WINDOW, TARGET = 64, 128


@pytest.fixture(scope="session")
def documents(corpus, tokenizer):
    """Twelve different documents of 128 tokens."""
    from ropecli.data.documents import read_documents

    texts = ((path.name, path.read_text()) for path in sorted(corpus.iterdir()))
    return read_documents(texts, tokenizer, TARGET, cut=TARGET)


@pytest.fixture
def scorer(documents):
    """scorer(3) -> a scorer on the first `count` documents."""
    from dataclasses import replace

    from ropecli.evaluation.driver import Store
    from ropecli.tuning.calibration import PointScorer

    def make(count: int = 3, target: int = TARGET) -> PointScorer:
        few = replace(documents, kept=documents.kept[:count])
        return PointScorer(few, WINDOW, target, 0.25, 32, Store())

    return make


@pytest.fixture
def sequences(documents) -> torch.Tensor:
    """The scorer's documents are among them, so that a few steps improve its score; shape (8, 128)."""
    return torch.from_numpy(np.stack([document.ids for document in documents.kept[:8]]))


class Run(NamedTuple):
    """What run_task takes, and what the tests look at."""

    task: Any
    model: Any
    scorer: Any
    on_point: Callable[[Any], None]

    @property
    def checkpoint(self) -> Any:
        return self.task.checkpoint

    @property
    def probe(self) -> torch.Tensor:
        return torch.from_numpy(self.task.calibration.evaluated.kept[0].ids[:64])[None]

    def tune(self, folder: Path | None = None) -> Any:
        from ropecli.tuning.procedure import run_task

        return run_task(self.task, self.model, folder=folder, on_point=self.on_point)


@pytest.fixture
def make_run(scorer, sequences, options_of, monkeypatch):
    """make_run(folder, level="grid", points=4, ...) -> a run on the model in the folder, freshly loaded, at ×2."""
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.checkpoint.patch_plan import make_plan
    from ropecli.live.loading import load_model
    from ropecli.scaling.spec import make_spec
    from ropecli.tuning.calibration import Calibration, TuningTask
    from ropecli.tuning.task import TuneSettings

    monkeypatch.setattr("ropecli.tuning.learning.EVALUATE_EVERY", 2)

    def make(
        folder: Path,
        factor: float = 2.0,
        *,
        dtype: str = "float32",
        on_point: Callable[[Any], None] = lambda point: None,
        **settings: Any,
    ) -> Run:
        checkpoint = open_checkpoint(folder, weights=True)
        scored_by = scorer(target=round(WINDOW * factor))
        calibration = Calibration(scored_by.documents, sequences[:, : scored_by.target_length])
        chosen = options_of(TuneSettings, **{"steps": 6, "batch_size": 4, "targets": 32, **settings})
        baseline = make_plan(checkpoint, make_spec("yarn", factor))
        task = TuningTask(checkpoint, chosen, "texts", None, baseline, calibration)
        return Run(task, load_model(checkpoint, dtype=dtype, device="cpu"), scored_by, on_point)

    return make
