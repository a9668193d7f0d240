"""eval-ppl and compare --protocol longppl: an evaluator finds key tokens once, and every model is scored on them."""

import json

import pytest

from ropecli.evaluation.tasks import key_tokens


@pytest.fixture(scope="module")
def repeating(tmp_path_factory):
    """Three texts of more than 640 tokens, which repeat their beginning after some 350 others."""
    from ropecli.demo import corpus

    folder = tmp_path_factory.mktemp("repeating")
    files = [text for _, text in sorted(corpus.held_out_files().items()) if len(text) > 20_000]
    for index in range(3):
        passage = files[index][4000:4900]
        (folder / f"text{index}.txt").write_text(passage + files[index + 3][5000:6000] + passage, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def yarn(tmp_path_factory):
    """The demo patched with yarn ×4: it reads 1,024 tokens."""
    from ropecli import patch

    output = tmp_path_factory.mktemp("patched") / "yarn"
    patch("demo", method="yarn", factor=4, output=output)
    return output


def test_keys_are_found_once_and_read_for_other_models(ropecli, repeating, yarn, tmp_path):
    keys, report = tmp_path / "keys.json", tmp_path / "report.json"
    fixed = ["--data", repeating, "--protocol", "longppl", "--lengths", "256,640", "--keys", keys]
    outcome = ropecli(
        "eval-ppl", yarn, "--evaluator", yarn, "--baseline", "demo", "--output", report, *fixed
    ).succeeds()
    base, first = json.loads(report.read_text())["reports"]
    count = first["rows"][0]["tokens"]
    assert count >= 5
    assert [row["tokens"] for one in (first, base) for row in one["rows"]] == [count] * 3
    assert f"\n{count} of 1,9" in outcome.err
    assert f"{count} key tokens give wide intervals" in outcome.err
    assert f"documents, {count} key tokens" in outcome.printed
    search = {"length": 640, "short_context": 256, "stride": 64, "min_gain": 2.0, "max_loss": 2.0}
    assert first["settings"]["key_tokens"] == {"evaluator": str(yarn), "digest": first["digest"], **search}
    # the evaluator uses more than the demo's 256 tokens
    assert base["rows"][0]["nll"] > 2 > first["rows"][1]["nll"]
    assert [one["name"] for one in first["headlines"]] == ["short-context cost", "long-context gain"]

    compared = ropecli("compare", yarn, "--methods", "none,as-is", "--json", *fixed)
    assert "finding key tokens" not in compared.err
    reports = {one["method"]: one for one in compared.reports()}
    for method, earlier in (("yarn", first), ("none", base)):
        assert reports[method]["fingerprint"] == earlier["fingerprint"]
        nll = [row["nll"] for row in earlier["rows"]]
        assert [row["nll"] for row in reports[method]["rows"]][: len(nll)] == pytest.approx(nll, rel=1e-4)


@pytest.fixture
def evaluate(ropecli, llama, corpus, monkeypatch):
    """Random weights have no loss below 2 nats."""
    monkeypatch.setattr(key_tokens, "MIN_GAIN", 0.5)
    monkeypatch.setattr(key_tokens, "MAX_LOSS", 8.0)

    def call(*options, checkpoint=llama, lengths=("--lengths", "64,128")):
        fixed = ["--data", corpus, "--protocol", "longppl", "--max-documents", 3]
        return ropecli("eval-ppl", checkpoint, *fixed, *lengths, *options)

    return call


def test_keys_of_another_evaluator_or_damaged_ones_are_refused(evaluate, llama, edited, tmp_path, monkeypatch):
    keys, other = tmp_path / "keys.json", edited(llama, rms_norm_eps=1e-3)
    evaluate("--evaluator", llama, "--keys", keys).succeeds()
    evaluate("--evaluator", other, "--keys", keys).is_refused("has the key tokens of another evaluator")
    evaluate("--keys", keys, lengths=("--lengths", "64,256")).is_refused("--lengths asks for 256")
    written = json.loads(keys.read_text())
    written["documents"][0]["positions"].pop()
    keys.write_text(json.dumps(written))
    evaluate("--keys", keys).is_refused("does not match its checksum")
    monkeypatch.setattr(key_tokens, "MAX_LOSS", 0.0)
    # nothing is left that other lengths or data would have to be resumed from
    for options in ([], ["--keys", tmp_path / "others.json"]):
        none = evaluate("--evaluator", llama, "--output", tmp_path / "report.json", *options)
        none.is_refused("found no key tokens in 3 documents")
    assert {path.name for path in tmp_path.iterdir()} == {"keys.json", "edited"}


def test_an_evaluator_with_another_tokenizer_is_refused_before_and_after_the_search(evaluate, llama, tmp_path):
    keys = tmp_path / "keys.json"
    evaluate("--evaluator", "demo", "--keys", keys).is_refused(f"demo has another tokenizer than {llama}; use an")
    evaluate("--evaluator", llama, "--keys", keys).succeeds()
    evaluate("--keys", keys, checkpoint="demo").is_refused(f"{llama} has another tokenizer than demo; use an")


def test_default_lengths_end_with_those_of_the_keys(evaluate, llama, patched, tmp_path):
    keys, four = tmp_path / "keys.json", patched(llama, "yarn", 4.0)
    evaluate("--evaluator", llama, "--keys", keys).succeeds()
    report = evaluate("--keys", keys, "--json", checkpoint=four, lengths=()).report()
    assert [row["length"] for row in report["rows"]] == [16, 32, 64, 128]


@pytest.mark.parametrize(
    ("after", "with_file", "left"),
    [
        (2, True, ["keys.json.state"]),
        (5, False, ["report.json.keys.state", "report.json.state"]),
    ],
)
def test_a_stopped_run_resumes(evaluate, llama, stopping, tmp_path, after, with_file, left):
    """Within the search for key tokens in 3 documents, and within the 6 measurements after it."""
    output, keys = tmp_path / "report.json", tmp_path / "keys.json"
    options = ["--evaluator", llama, "--output", output, *(["--keys", keys] if with_file else [])]
    with stopping(after):
        assert evaluate(*options).code == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == left
    evaluate(*options).is_refused("a run that was interrupted")
    with stopping(0) as samples:
        evaluate(*options, "--resume").succeeds()
    assert len(samples) == 9 - after
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keys.json", "report.json"][1 - with_file :]
    whole = evaluate("--evaluator", llama, "--json").report()
    assert [cell["sums"] for cell in json.loads(output.read_text())["reports"][0]["cells"]] == [
        cell["sums"] for cell in whole["cells"]
    ]
