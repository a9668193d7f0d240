"""`loss_weighting: documents`: a step on packed conversations equals one on their mean losses, each read alone."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from ropecli.checkpoint.opening import open_checkpoint
from ropecli.data.sequences import UNSCORED
from ropecli.data.sources import Source
from ropecli.data.stream import open_stream
from ropecli.data.token_store import tokenize_rows
from ropecli.live.loading import load_tokenizer
from ropecli.training.recipe_schema import make_recipe

LENGTH = 48


@pytest.fixture(scope="module")
def chat_tokenizer(patched_llama):
    return load_tokenizer(open_checkpoint(patched_llama))


@pytest.fixture
def one_by_one(patched_llama, chat, chat_tokenizer):
    """(mean loss of all tokens, gradient norm of the mean of the documents' mean losses), from transformers alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(patched_llama, dtype=torch.float32)

    def losses(ids, trained):
        labels = torch.where(trained, ids, UNSCORED)[1:]
        logits = model(input_ids=ids[None]).logits[0, :-1]
        return cross_entropy(logits, labels, reduction="none")[labels != UNSCORED]

    def pieces(document):
        sizes = np.diff([*document.turns, len(document.ids)])
        assert max(sizes) <= LENGTH < min([*(sizes[1:] + sizes[:-1]), LENGTH + 1])  # a turn per piece
        columns = (torch.from_numpy(column).split(sizes.tolist()) for column in (document.ids, document.trained))
        return zip(*columns, strict=True)

    documents = [
        torch.cat([losses(*piece) for piece in pieces(document)])
        for document in tokenize_rows(Source(str(chat)).rows(), chat_tokenizer, "assistant")
    ]
    torch.stack([document.mean() for document in documents]).mean().backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    return torch.cat(documents).mean().item(), norm.item()


def test_documents_in_packed_sequences_weigh_as_if_read_one_by_one(
    tune, patched_llama, chat, chat_tokenizer, one_by_one, metrics, tmp_path
):
    keys = {
        "data": str(chat),
        "length": LENGTH,
        "steps": 1,
        "sequences": "packed",
        "loss_weighting": "documents",
        "overlong": "cut",
    }
    stream = open_stream(make_recipe(None, keys), chat_tokenizer, LENGTH, LENGTH)
    batch = stream.batch(range(len(stream)))
    assert batch.weight == pytest.approx(12)
    assert (batch.labels != UNSCORED).sum(1).max() < batch.document_labels.max()  # a document in several sequences

    def step(name, **changes):
        [line] = metrics(tune(patched_llama, tmp_path / name, **{**keys, **changes}))
        return line["loss"], line["grad_norm"]

    passes = {"batch_size": 1, "gradient_accumulation": len(stream)}
    assert step("passes", **passes) == pytest.approx(one_by_one, rel=1e-4)
    loss, norm = step("tokens", **passes, loss_weighting="tokens")
    assert loss == pytest.approx(one_by_one[0], rel=1e-4)
    assert norm != pytest.approx(one_by_one[1], rel=0.01)
