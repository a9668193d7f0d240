"""Stores of documents whose every token is unique, and recipes as small as a stream needs."""

from types import SimpleNamespace

import numpy as np
import pytest

from ropecli.data.token_store import Shard, TokenStore

STEP = 1000
"""Document d, token t is d * STEP + t."""


@pytest.fixture(scope="session")
def numbered():
    """numbered(8, 23, ...) -> a store of documents of these lengths; document d, token t is d * 1000 + t.

    trained: whether to train on a token, by its id.
    """

    def make(*lengths: int, trained=None) -> TokenStore:
        documents = [document * STEP + np.arange(length, dtype=np.int32) for document, length in enumerate(lengths)]
        ids = np.concatenate(documents)
        mask = np.ones(len(ids), dtype=bool) if trained is None else trained(ids)
        turns, counts = np.empty(0, dtype=np.int64), np.zeros(len(lengths), dtype=np.int64)
        return TokenStore([Shard(np.array(lengths, dtype=np.int64), ids, mask, turns, counts)])

    return make


@pytest.fixture(scope="session")
def source():
    """source(data, key=value, ...) -> a source as a recipe has it, everything else at its default."""

    def make(data: object, **keys: object) -> SimpleNamespace:
        defaults = {
            "weight": 1.0,
            "text_column": "text",
            "train_on": None,
            "split": None,
            "skip_faulty": False,
            "sequences": None,
            "overlong": "drop",
            "end_token": None,
            "drop_unrendered": False,
            "max_documents": None,
            "max_tokens": None,
            "long_from": None,
            "keep_short": 1.0,
        }
        return SimpleNamespace(**{**defaults, "data": str(data), **keys})

    return make


@pytest.fixture(scope="session")
def stream_of(tokenizer):
    """stream_of(source, ..., length=16, window=64, key=value) -> a stream through the tiny tokenizer."""
    from ropecli.data.stream import open_stream

    defaults = {"positions": "full", "pose_chunks": 2, "loss_weighting": "tokens", "seed": 0}

    def make(*sources, length=16, window=64, tokenizer=tokenizer, **options):
        keys = {key: options.pop(key, default) for key, default in defaults.items()}
        recipe = SimpleNamespace(sources=sources, **keys)
        return open_stream(recipe, tokenizer, length, window, **options)

    return make
