"""Packed documents, gaps in the positions and mixtures, trained through the whole loop."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from ropecli.data.sequences import UNSCORED
from ropecli.data.stream import open_stream
from ropecli.errors import DataError
from ropecli.training.recipe import make_recipe


@pytest.fixture(scope="module")
def model(patched_llama):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(patched_llama, dtype=torch.float32).eval()


@torch.no_grad()
def first_loss(model, rows):
    """Mean over all scored tokens of (ids, labels, positions, mask) rows, nats."""
    total, targets = 0.0, 0
    for ids, labels, positions, mask in rows:
        logits = model(input_ids=ids[None], position_ids=positions[None], attention_mask=mask).logits[0]
        total += cross_entropy(logits, labels, ignore_index=UNSCORED, reduction="sum").item()
        targets += int((labels != UNSCORED).sum())
    return total / targets


def documents_of(batch):
    """Each packed document by itself."""
    for ids, labels, positions in zip(batch.ids, batch.labels, batch.positions, strict=True):
        starts = [*np.flatnonzero(positions == 0), len(ids)]
        for start, stop in pairwise(starts):
            part = (torch.from_numpy(array[start:stop]) for array in (ids, labels, positions))
            yield *part, None


def test_a_step_on_packed_documents_is_the_mean_over_their_tokens_each_document_read_alone(
    model, tune, patched_llama, tokenizer, tmp_path, metrics
):
    text = tmp_path / "lines"
    text.mkdir()
    for number in range(40):
        (text / f"{number:02}.txt").write_text(f"the fox number {number} jumps " * (1 + number % 7))
    keys = {"data": str(text), "sequences": "packed", "length": 64, "batch_size": 3, "gradient_accumulation": 2}
    stream = open_stream(make_recipe(None, keys), tokenizer, 64, 64)
    batch = stream.batch(range(6))
    counts = (batch.labels != UNSCORED).sum(1)
    assert counts[:3].sum() != counts[3:].sum()  # else a mean of means would do
    assert (batch.positions == 0).sum() > len(batch.ids)
    losses = [line["loss"] for line in metrics(tune(patched_llama, **keys, steps=1))]
    assert losses == [pytest.approx(first_loss(model, documents_of(batch)), rel=1e-5)]


@pytest.mark.parametrize("positions", ["pose", "randomized"])
def test_a_step_with_gaps_reads_the_whole_sequence_at_those_positions(
    model, tune, patched_llama, tokenizer, corpus, metrics, positions
):
    keys = {"data": str(corpus), "positions": positions, "length": 48}
    batch = open_stream(make_recipe(None, keys), tokenizer, 48, 128).batch(range(4))
    assert batch.positions.max() > 64
    sight = torch.zeros(1, 1, 48, 48).masked_fill(torch.ones(48, 48).triu(1).bool(), torch.finfo().min)
    rows = [
        (*(torch.from_numpy(array[index]) for array in (batch.ids, batch.labels, batch.positions)), sight)
        for index in range(4)
    ]
    losses = [line["loss"] for line in metrics(tune(patched_llama, **keys, steps=1))]
    assert losses == [pytest.approx(first_loss(model, rows), rel=1e-5)]


def test_a_mixture_reads_each_source_in_its_share(tune, patched_llama, corpus, tmp_path, metrics):
    other = tmp_path / "other.txt"
    other.write_text("one two three " * 400)
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.training.finetuning import finetune_checkpoint

    told = []
    sources = [{"data": str(corpus), "weight": 3}, {"data": str(other), "weight": 1, "sequences": "concat"}]
    recipe = make_recipe(None, {"mixture": sources, "length": 48, "steps": 2, "mixed_precision": "none"})
    finetune_checkpoint(open_checkpoint(patched_llama), recipe, tmp_path / "run", say=told.append)
    assert len(metrics(tmp_path / "run")) == 2
    summary = [sentence for sentence in told if "75" in sentence or "25" in sentence]
    assert len(summary) == 2, told


def test_tokens_that_the_model_has_no_row_for_are_refused_before_training(tune, build, tmp_path):
    """As by a tokenizer of another model."""
    with pytest.raises(DataError, match="do not match"):
        tune(build("llama", head_dim=32, vocab_size=200))
    assert list(tmp_path.iterdir()) == []
