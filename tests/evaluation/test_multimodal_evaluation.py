"""Multimodal models read text; encoders have no perplexity."""

import pytest
import torch
from transformers import AutoModelForMultimodalLM

import ropecli
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.errors import CheckpointError
from ropecli.live.loading import load_model


@pytest.mark.parametrize("model_type", ["llava", "qwen2_vl", "qwen3_vl", "llama4"])
@pytest.mark.parametrize("chunk", [None, 16])
@torch.no_grad()
def test_perplexity_of_text_is_that_of_the_whole_model(model_type, chunk, build, tokenizer, corpus):
    """Against a plain forward pass of transformers over the first 48 tokens of each document."""
    folder = build(model_type)
    options = {"lengths": [48], "protocol": "prefix", "max_documents": 3, "chunk": chunk}
    [report] = ropecli.eval_ppl(str(folder), data=str(corpus), **options).reports
    model = AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32).eval()
    losses = []
    for path in sorted(corpus.iterdir())[:3]:
        ids = tokenizer(path.read_text(), return_tensors="pt").input_ids[:, :48]
        losses.append(torch.nn.functional.cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:]))
    assert report.cells[0].value == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)


def test_every_part_is_loaded(build):
    """As a causal LM, transformers would load only the text part of Llama 4."""
    model = load_model(open_checkpoint(build("llama4"), weights=True))
    assert any("vision" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize("command", ["eval_ppl", "finetune"])
def test_an_encoder_is_refused(command, build, corpus, tmp_path):
    folder, call = build("eurobert"), getattr(ropecli, command)
    options = {"output": str(tmp_path / "run"), "steps": 1} if command == "finetune" else {"lengths": [16]}
    with pytest.raises(CheckpointError, match=r"is an encoder \(eurobert\): it sees later tokens too"):
        call(str(folder), data=str(corpus), **options)
    assert not (tmp_path / "run").exists()
