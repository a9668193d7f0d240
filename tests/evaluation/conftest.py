"""Models and documents, and perplexity as anybody would compute it with transformers alone."""

import numpy as np
import pytest


@pytest.fixture(scope="session")
def loaded():
    """loaded(folder, dtype="float32") -> a fresh model from stock transformers, in evaluation mode."""
    from transformers import AutoModelForCausalLM

    return lambda folder, dtype="float32": AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@pytest.fixture(scope="session")
def documents(corpus, tokenizer):
    """Four documents of the corpus, each of at least 200 tokens."""
    from ropecli.data.documents import read_documents
    from ropecli.data.sources import Source

    return read_documents(Source(str(corpus)).texts(), tokenizer, 200, most=4)


@pytest.fixture(scope="session")
def uneven(corpus, tokenizer):
    """Make documents: uneven(tokens, ..., prefix=(0,)). prefix: the first tokens of each, like <s>."""
    from ropecli.data.documents import Document, Documents, SpecialTokens, read_documents
    from ropecli.data.sources import Source

    whole = read_documents(Source(str(corpus)).texts(), tokenizer, 800, count_bytes=True).kept

    def make(*tokens, prefix=(0,)):
        kept = []
        for one, count in zip(whole, tokens, strict=False):
            ids = np.concatenate([prefix, one.ids]).astype(np.int64)[:count]
            ends = np.concatenate([np.zeros(len(prefix), dtype=np.int64), one.ends])[:count]
            kept.append(Document(one.name, ids, ends))
        assert [len(one.ids) for one in kept] == list(tokens)
        return Documents(tuple(kept), 0, SpecialTokens(tuple(prefix)))

    return make


@pytest.fixture(scope="session")
def prompts(tokenizer, corpus):
    """Makes prompts with a key in a text of the corpus."""
    from ropecli.evaluation.needle_prompts import STYLES, RetrievalPrompts
    from ropecli.evaluation.prompt_pieces import PieceTokenizer, read_haystack

    pieces = PieceTokenizer(tokenizer)
    haystack = read_haystack([("a", (corpus / "text00.txt").read_text())], pieces)
    return RetrievalPrompts(STYLES["code"], haystack, pieces)


@pytest.fixture(scope="session")
def sliding_gemma(build):
    """A layer that sees 32 tokens, and one that sees all."""
    layers = ["sliding_attention", "full_attention"]
    return build("gemma3_text", head_dim=32, sliding_window=32, layer_types=layers, query_pre_attn_scalar=4)


@pytest.fixture(scope="session")
def plain_nll():
    """plain_nll(model, ids) -> -ln p of every token but the first, from the whole logits of one forward pass."""
    import torch

    @torch.no_grad()
    def score(model, ids):
        ids = torch.as_tensor(np.array(ids))
        log_probabilities = torch.log_softmax(model(input_ids=ids[None]).logits[0].double(), dim=-1)
        return -log_probabilities[:-1].gather(1, ids[1:, None])[:, 0].numpy()

    return score


@pytest.fixture(scope="session")
def patched(tmp_path_factory):
    """patched(folder, method, factor, **params) -> the folder that `ropecli patch` writes."""
    from ropecli.attention.patching import patch_to
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.checkpoint.patch_plan import make_plan
    from ropecli.scaling.spec import make_spec

    def patch(folder, method, factor=4.0, **params):
        output = tmp_path_factory.mktemp("patched") / method
        patch_to(make_plan(open_checkpoint(folder), make_spec(method, factor, params)), output, verify=False)
        return output

    return patch
