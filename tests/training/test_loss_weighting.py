"""`loss_weighting: documents`: a step on packed documents equals one on their mean losses, each read alone."""

import json

import pytest
import torch
from torch.nn.functional import cross_entropy

from ropecli.checkpoint.opening import open_checkpoint
from ropecli.data.documents import tokenize
from ropecli.data.stream import open_stream
from ropecli.live.loading import load_tokenizer
from ropecli.training.recipe import make_recipe

LENGTH = 48
KEYS = {"length": LENGTH, "steps": 1, "sequences": "packed", "loss_weighting": "documents"}
WORDS = (3, 20, 5, 70, 11, 18)
"""Words per document. The fourth has more tokens than a sequence."""


@pytest.fixture
def data(tmp_path, corpus):
    words = (corpus / "text00.txt").read_text().split()
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"text": " ".join(words[:count])}) + "\n" for count in WORDS))
    return path


@pytest.fixture
def one_by_one(patched_llama, data):
    """(mean loss of all tokens, gradient norm of the mean of the documents' mean losses), from transformers alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(patched_llama, dtype=torch.float32)

    def losses(ids):
        return cross_entropy(model(input_ids=ids[None]).logits[0, :-1], ids[1:], reduction="none")

    texts = [("", json.loads(line)["text"]) for line in data.read_text().splitlines()]
    documents = [
        torch.cat([losses(piece) for piece in torch.from_numpy(document.ids).split(LENGTH) if len(piece) > 1])
        for document in tokenize(texts, load_tokenizer(open_checkpoint(patched_llama)))
    ]
    assert max(map(len, documents)) > LENGTH
    torch.stack([document.mean() for document in documents]).mean().backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    return torch.cat(documents).mean().item(), norm.item()


def test_a_step_on_packed_documents_equals_reading_them_one_by_one(
    tune, patched_llama, data, one_by_one, metrics, tmp_path
):
    recipe = make_recipe(None, {"data": str(data), **KEYS})
    sequences = len(open_stream(recipe, load_tokenizer(open_checkpoint(patched_llama)), LENGTH, LENGTH))
    assert 1 < sequences < len(WORDS)

    def step(name, **keys):
        [line] = metrics(tune(patched_llama, tmp_path / name, data=str(data), **{**KEYS, **keys}))
        return line["loss"], line["grad_norm"]

    assert step("a pass", batch_size=sequences, gradient_accumulation=1) == pytest.approx(one_by_one, rel=1e-4)
    passes = {"batch_size": 1, "gradient_accumulation": sequences}
    assert step("passes", **passes) == pytest.approx(one_by_one, rel=1e-4)
    loss, norm = step("by token", **passes, loss_weighting="tokens")
    assert loss == pytest.approx(one_by_one[0], rel=1e-4)
    assert norm != pytest.approx(one_by_one[1], rel=0.01)
