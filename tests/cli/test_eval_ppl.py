"""ropecli eval-ppl: one checkpoint, or two on the same tokens."""

import json
import math

import pytest

from ropecli.reporting.lines import sets_of


def losses(report):
    return [cell["sums"] for cell in report["cells"]]


def test_a_model_is_the_same_as_a_folder_and_as_a_method(ropecli, llama, yarn, corpus):
    options = ("--data", corpus, "--lengths", "24", "--max-documents", 2, "--json")
    base, patched = ropecli("compare", llama, "--methods", "none,yarn", "--factors", 4, *options).reports()
    saved = ropecli("eval-ppl", yarn, *options).report()
    assert base["scaling"] != patched["scaling"] == saved["scaling"]
    assert base["weights"] == patched["weights"] == saved["weights"]
    assert base["documents"] == saved["documents"]


def test_a_baseline_that_is_also_listed_is_measured_once_and_is_the_base(ropecli, llama, yarn, corpus, tmp_path):
    import ropecli as package

    (tmp_path / "link").symlink_to(yarn)
    options = ("--data", corpus, "--lengths", "24", "--max-documents", 8)
    outcome = ropecli("eval-ppl", llama, yarn, "--baseline", tmp_path / "link", *options, "--json")
    assert [report["checkpoint"] for report in outcome.reports()] == [str(yarn), str(llama)]
    reports = package.eval_ppl([llama], baseline=str(yarn), data=str(corpus), lengths=[24], max_documents=8).reports
    [[first, second]] = sets_of(reports)
    assert first.name == f"{yarn.name} (base)"
    assert second.name == llama.name


def test_the_result_says_what_was_measured(evaluate, measured, yarn):
    report = measured("--method", "linear", "--factor", 4, "--original-length", 32)
    assert (report["in_memory"], report["original_max_position_embeddings"]) == (True, 32)
    plain = measured()
    assert (plain["in_memory"], plain["original_max_position_embeddings"]) == (False, 64)
    assert losses(plain) != losses(report)
    assert "linear ×4 in memory: perplexity" in evaluate("--method", "linear", "--factor", 4).printed
    assert "none in memory" in evaluate("--method", "none", checkpoint=yarn).printed
    assert "in memory" not in evaluate().out


@pytest.fixture
def few(corpus, tmp_path):
    """Three documents of 200 tokens and more, of some 40 and of two."""
    folder = tmp_path / "few"
    folder.mkdir()
    text = (corpus / "text00.txt").read_text()
    for name, characters in (("a", 900), ("b", 120), ("c", 2)):
        (folder / f"{name}.txt").write_text(text[:characters])
    return folder


def test_skipped_documents_are_counted_in_a_warning(evaluate, few):
    outcome = evaluate("--json", data=few, lengths="24,64")
    assert outcome.report()["too_short"] == 2
    assert "2 documents" in outcome.err


def test_whole_documents_are_all_scored_and_short_ones_are_named(evaluate, few, tokenizer):
    tokens = [len(tokenizer((few / f"{name}.txt").read_text())["input_ids"]) for name in "abc"]
    assert tokens[0] > 100 > 64 > tokens[1] > 24 > tokens[2] >= 2
    outcome = evaluate("--json", "--protocol", "sliding", data=few, lengths="24,100")
    report = outcome.report()
    assert (report["document_names"], report["too_short"]) == (["a.txt", "b.txt", "c.txt"], 0)
    assert "2 documents shorter than 100 tokens: scored with less context" in outcome.said
    assert [row["tokens"] for row in report["rows"]] == [sum(tokens) - 3] * 2
    assert report["cells"][0]["weights"] == [count - 1 for count in tokens]


def test_whole_documents_can_be_cut(evaluate, few):
    options = ["--json", "--protocol", "sliding", "--max-tokens", 90]
    outcome = evaluate(*options, data=few, lengths="24,60")
    report = outcome.report()
    assert report["cells"][0]["weights"][0] == 89
    assert "2 documents shorter than 60 tokens: scored with less context" in outcome.said


# With a baseline.


@pytest.fixture
def mean_loss(corpus, tokenizer):
    """mean_loss(folder, length, targets, end) -> nats per token, by stock transformers and from the text.

    The model reads `length` tokens of each of the 4 documents, up to token `end`, and the last `targets` are scored.
    """
    import torch
    from transformers import AutoModelForCausalLM

    def compute(folder, length, targets, end):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
        losses = []
        for path in sorted(corpus.iterdir())[:4]:
            ids = torch.tensor([tokenizer(path.read_text())["input_ids"][end - length : end]])
            with torch.no_grad():
                logits = model(input_ids=ids).logits[0, -targets - 1 : -1].double()
            losses.append(torch.nn.functional.cross_entropy(logits, ids[0, -targets:]).item())
        return sum(losses) / len(losses)

    return compute


LENGTHS = "24,64,128,256"


@pytest.mark.parametrize(
    ("protocol", "factor", "lengths"),
    [("prefix", 2, LENGTHS), ("tail", 2, LENGTHS), ("tail", 8, LENGTHS), ("tail", 2, "256")],
)
def test_cost_is_within_the_pretraining_length_and_gain_against_all_that_the_baseline_reads(
    evaluate, llama, yarn, patched, mean_loss, protocol, factor, lengths
):
    """Both are pretrained on 64 tokens; the baseline reads factor × 64, also where no length is within that."""
    base, tail = patched(llama, "yarn", factor), protocol == "tail"
    options = ["--json", "--baseline", base, "--protocol", protocol, *(["--targets", 12] if tail else [])]
    _, report = evaluate(*options, checkpoint=yarn, lengths=lengths).reports()
    changes = {row["length"]: row["change"] for row in report["rows"]}
    for length in changes.keys() & {64, 256}:
        base_length = min(256, 64 * factor) if tail and length == 256 else length
        ours, theirs = (
            mean_loss(folder, tokens, 12 if tail else tokens - 1, 256 if tail else tokens)
            for folder, tokens in ((yarn, length), (base, base_length))
        )
        change = changes[length]
        assert change["change"] == pytest.approx(math.expm1(ours - theirs), rel=1e-4)
        assert change["low"] < change["change"] < change["high"]


def test_another_vocabulary_is_refused_before_any_model_is_loaded(evaluate, source, tokenizer, corpus, monkeypatch):
    from ropecli.evaluation import subject

    value = json.loads((source / "tokenizer.json").read_text())
    vocabulary = value["model"]["vocab"]
    used = tokenizer((corpus / "text00.txt").read_text())["input_ids"][:20]
    first, second = tokenizer.convert_ids_to_tokens(sorted(set(used))[:2])
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (source / "tokenizer.json").write_text(json.dumps(value))
    monkeypatch.setattr(subject, "load_model", lambda *arguments, **options: pytest.fail("the model was loaded"))
    evaluate("--baseline", source).is_refused("another vocabulary", "bits per byte")
