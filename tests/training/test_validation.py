"""Perplexity during training is what eval-ppl measures, and leaves no trace in what is trained."""

import json
from pathlib import Path

import pytest

import ropecli
from ropecli.errors import DataError, NotFiniteError

WINDOW, EXTENDED = 64, 128


@pytest.fixture(scope="session")
def prepared():
    """prepared(checkpoint, say=..., key=value, ...) -> (evaluation, launch, the loss in training mode)."""
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.live.loading import load_model, load_tokenizer
    from ropecli.training.launch import start_launch
    from ropecli.training.loss import NextTokenLoss
    from ropecli.training.recipe_schema import make_recipe
    from ropecli.training.validation import make_validation

    def make(folder: Path, say=lambda message: None, **keys):
        recipe = make_recipe(
            None, {"data": "demo-train", "mixed_precision": "none", "gradient_accumulation": 1, **keys}
        )
        checkpoint = open_checkpoint(folder)
        launch = start_launch(recipe)
        evaluation = make_validation(recipe, checkpoint, load_tokenizer(checkpoint), EXTENDED, launch, say)
        loss_of = NextTokenLoss(load_model(checkpoint, dtype="float32", device="cpu"))
        return evaluation, launch, launch.accelerator.prepare(loss_of.train())

    return make


@pytest.mark.parametrize("lengths", [(), (32, 96, 128)], ids=str)
def test_perplexity_is_that_of_eval_ppl(prepared, patched_llama, corpus, lengths):
    evaluation, *run = prepared(patched_llama, eval_data=str(corpus), eval_lengths=lengths, eval_documents=3)
    measured = evaluation.run(*run, 50)
    lengths = list(lengths or (WINDOW, EXTENDED))
    options = {"lengths": lengths, "max_documents": 3, "protocol": "tail", "device": "cpu"}
    rows = ropecli.eval_ppl(str(patched_llama), data=str(corpus), **options).reports[0].as_json()["rows"]
    assert measured["ppl"] == pytest.approx({str(row["length"]): row["ppl"] for row in rows}, rel=1e-5)
    tokens = rows[0]["tokens"]
    assert {**measured, "ppl": {}} == {"step": 50, "ppl": {}, "protocol": "tail", "documents": 3, "tokens": tokens}
    json.dumps(measured, allow_nan=False)


def test_eval_data_are_the_test_split_and_their_faults_are_named(prepared, patched_llama, tmp_path):
    for split in ("train", "test", "dev"):
        row = {"body": "ba de fi go ku " * 60, "text": None}
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    keys = {"eval_data": str(tmp_path), "eval_documents": 1, "eval_lengths": [32]}
    evaluation, *_ = prepared(patched_llama, text_column="body", **keys)
    assert [document.name for document in evaluation.documents.kept] == ["test.jsonl:1"]
    with pytest.raises(DataError, match=r"^--eval-data: "):
        prepared(patched_llama, text_column="nowhere", **keys)


def test_measured_model_trains_to_the_same_bits(build, prepared, corpus):
    """Frequencies that follow the length too are as before."""
    import torch

    parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    folder = build("llama", head_dim=32, attention_dropout=0.3, rope_parameters=parameters)
    trained = []
    for measures in (False, True):
        evaluation, launch, loss_of = prepared(folder, eval_data=str(corpus), eval_documents=2)
        optimizer = launch.accelerator.prepare(torch.optim.AdamW(loss_of.parameters(), lr=1e-3))
        torch.manual_seed(0)
        for step in range(3):
            if measures:
                evaluation.run(launch, loss_of, step)
            ids = torch.randint(0, 500, (2, 48))
            launch.accelerator.backward(loss_of(ids, ids))
            optimizer.step()
            optimizer.zero_grad()
        trained.append([parameter.detach().clone() for parameter in loss_of.parameters()])
    assert all(map(torch.equal, *trained))


def test_perplexity_that_is_not_finite_ends_the_run(prepared, patched_llama, corpus):
    import torch

    evaluation, launch, loss_of = prepared(patched_llama, eval_data=str(corpus))
    with torch.no_grad():
        loss_of.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(NotFiniteError, match="after step 7"):
        evaluation.run(launch, loss_of, 7)
    assert loss_of.training
