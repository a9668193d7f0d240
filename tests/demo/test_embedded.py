"""The embedded checkpoint: stock software loads it, and beyond its window it fails, which is what it is there for."""

import numpy as np
import pytest
import torch
from safetensors import safe_open

from ropecli.demo import FOLDER


@pytest.fixture(scope="module")
def model():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def documents():
    """The held-out files by stock transformers' tokenizer, those of at least sixteen windows."""
    from transformers import AutoTokenizer

    from ropecli.demo import corpus

    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    texts = [text for text in corpus.held_out_files().values() if not corpus.was_trained_on(text)]
    rows = [np.array(ids) for ids in tokenizer(texts, verbose=False)["input_ids"]]
    return [row for row in rows if len(row) >= 16 * 256]


def test_its_weights_are_bfloat16_safetensors_and_small():
    with safe_open(FOLDER / "model.safetensors", "pt") as weights:
        assert {weights.get_tensor(key).dtype for key in weights.keys()} == {torch.bfloat16}  # noqa: SIM118
    assert not [path.name for path in FOLDER.iterdir() if path.suffix in {".bin", ".pt", ".pth", ".pkl"}]
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) <= 12 * 2**20


def test_it_knows_python_within_its_window_and_fails_beyond(model, documents):
    nll = []
    with torch.no_grad():
        for ids in documents[:6]:
            row = torch.from_numpy(ids[:1024])[None]
            logits = model(input_ids=row).logits[0, :-1]
            nll.append(torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="none").double())
    nll = torch.stack(nll)
    within, beyond = nll[:, :255].mean().exp(), nll.mean().exp()
    assert within < 40
    assert beyond > 2 * within
