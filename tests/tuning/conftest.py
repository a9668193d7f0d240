"""Runs of tiny models on a few short documents, in this process, in float32."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

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
def evaluator(documents):
    """evaluator(documents=3, progress=...) -> an evaluator on the first so many of them."""
    from dataclasses import replace

    from ropecli.evaluation.saved_progress import EvalProgress
    from ropecli.tuning.calibration import Evaluator

    def make(
        count: int = 3, target: int = TARGET, progress: EvalProgress | None = None, short_weight: float = 0.25
    ) -> Evaluator:
        few = replace(documents, kept=documents.kept[:count])
        return Evaluator(few, WINDOW, target, short_weight, 32, progress or EvalProgress())

    return make


@pytest.fixture
def sequences(documents) -> torch.Tensor:
    """Those of the evaluator among them, so that a few steps improve its score; shape (8, 128)."""
    return torch.from_numpy(np.stack([document.ids for document in documents.kept[:8]]))


@pytest.fixture
def make_run(evaluator, sequences):
    """make_run(folder, level="grid", points=4, ...) -> a run on the model in the folder, freshly loaded, at ×2."""
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.live.loading import load_model
    from ropecli.tuning.tuning_run import TuningRun
    from ropecli.tuning.tuning_settings import Schedule, Settings

    def make(
        folder: Path,
        factor: float = 2.0,
        *,
        dtype: str = "float32",
        snapshots: Path | None = None,
        on_point: Callable[[Any], None] = lambda point: None,
        progress: Any = None,
        schedule: dict[str, Any] | None = None,
        **settings: Any,
    ) -> TuningRun:
        checkpoint = open_checkpoint(folder, weights=True)
        target = round(WINDOW * factor)
        return TuningRun(
            checkpoint,
            load_model(checkpoint, dtype=dtype, device="cpu"),
            factor,
            evaluator(target=target, progress=progress),
            sequences[:, :target],
            Settings(
                schedule=Schedule(**{"steps": 6, "batch_size": 4, "evaluate_every": 2, **(schedule or {})}), **settings
            ),
            snapshots,
            on_point,
        )

    return make
