import pytest


@pytest.fixture
def report():
    """report(ppl at 256, at 512, at 1024, method=..., ...) -> an EvalReport with these numbers."""
    from ropecli.evaluate.perplexity import Row
    from ropecli.evaluate.report import EvalReport

    def make(*ppls, method="none", factor=1.0, params=None, checkpoint="folder", source="demo"):
        import math

        rows = [
            Row(length, ppl, math.log(ppl), ppl * 0.9, ppl * 1.1, 4 * (length - 1), 4, (1.0, 2.0, 3.0, 4.0))
            for length, ppl in zip((256, 512, 1024), ppls, strict=True)
        ]
        return EvalReport(
            checkpoint=checkpoint,
            digest="0" * 64,
            method=method,
            factor=factor,
            params=params or {},
            in_memory=False,
            original_max_position_embeddings=256,
            protocol="prefix",
            source=source,
            fingerprint="1" * 64,
            too_short=0,
            dtype="float32",
            device="cpu",
            rows=rows,
            document_names=["a", "b", "c", "d"],
        )

    return make
