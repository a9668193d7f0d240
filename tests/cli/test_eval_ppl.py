"""ropecli eval-ppl: one JSON document or one message, whatever is asked."""

import json
import math

import pytest
import torch

FIELDS = {
    "schema_version": int,
    "checkpoint": str,
    "digest": str,
    "method": str,
    "factor": float,
    "params": dict,
    "in_memory": bool,
    "original_max_position_embeddings": int,
    "protocol": str,
    "source": str,
    "fingerprint": str,
    "too_short": int,
    "dtype": str,
    "device": str,
    "rows": list,
    "document_names": list,
    "environment": dict,
}
ROW_FIELDS = {"length", "ppl", "nll", "ppl_low", "ppl_high", "tokens", "documents", "document_nll"}


@pytest.fixture
def evaluate(ropecli, llama, corpus):
    def call(*options, checkpoint=llama, data=corpus, lengths="24,64"):
        return ropecli("eval-ppl", checkpoint, "--data", data, "--lengths", lengths, *options)

    return call


def test_json_is_all_that_is_on_standard_output(evaluate, llama, corpus):
    outcome = evaluate("--json")
    report = json.loads(outcome.out)
    assert outcome.code == 0
    assert {key: type(value) for key, value in report.items()} == FIELDS
    assert (report["schema_version"], report["method"], report["protocol"]) == (1, "none", "prefix")
    assert (report["checkpoint"], report["source"]) == (str(llama), str(corpus))
    assert {"ropecli", "torch", "transformers", "python"} <= report["environment"].keys()
    assert report["document_names"] == sorted(path.name for path in corpus.iterdir())


def test_rows_hold_their_numbers(evaluate):
    report = json.loads(evaluate("--json", "--max-documents", 5, lengths="64,24,24").out)
    assert [row["length"] for row in report["rows"]] == [24, 64]
    for row in report["rows"]:
        assert row.keys() == ROW_FIELDS
        assert row["documents"] == len(row["document_nll"]) == len(report["document_names"]) == 5
        assert row["tokens"] == 5 * (row["length"] - 1)
        assert row["nll"] == pytest.approx(sum(row["document_nll"]) / row["tokens"])
        assert row["ppl"] == pytest.approx(math.exp(row["nll"]))
        assert row["ppl_low"] <= row["ppl"] <= row["ppl_high"]


def test_the_report_file_is_what_is_printed(evaluate, tmp_path):
    outcome = evaluate("--json", "--output", tmp_path / "new" / "report.json")
    assert json.loads((tmp_path / "new" / "report.json").read_text()) == json.loads(outcome.out)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["report.json"]


def test_the_table_shows_the_same_numbers(evaluate):
    report = json.loads(evaluate("--json").out)
    table = evaluate().out
    for row in report["rows"]:
        assert f"{row['ppl']:.2f}" in table
        assert f"{row['ppl_low']:.2f} to {row['ppl_high']:.2f}" in table


def test_a_patched_checkpoint_is_reported_with_its_method(ropecli, evaluate, llama, tmp_path):
    ropecli("patch", llama, "--method", "yarn", "--factor", 4, "--set", "beta_fast=8", "--output", tmp_path / "yarn")
    report = json.loads(evaluate("--json", checkpoint=tmp_path / "yarn").out)
    assert (report["method"], report["factor"], report["params"]["beta_fast"]) == ("yarn", 4.0, 8)


def test_documents_left_out_are_counted_and_said(evaluate, corpus, tmp_path):
    (tmp_path / "short.txt").write_text("ba")
    (tmp_path / "long.txt").write_text((corpus / "text00.txt").read_text())
    outcome = evaluate("--json", data=tmp_path)
    assert json.loads(outcome.out)["too_short"] == 1
    assert "1 document" in outcome.err


def test_the_fingerprint_is_of_the_text_that_was_read(evaluate, corpus, tmp_path):
    text = (corpus / "text00.txt").read_text()
    prints = []
    for index, body in enumerate([text, text + " ba de fi", "ba" + text]):
        (tmp_path / f"{index}.txt").write_text(body)
        prints.append(json.loads(evaluate("--json", data=tmp_path / f"{index}.txt").out)["fingerprint"])
    assert prints[0] == prints[1] != prints[2]  # beyond the longest length nothing is read


def test_the_dtype_is_reported_and_changes_little(evaluate):
    reports = [json.loads(evaluate("--json", "--dtype", name).out) for name in ("float32", "bfloat16")]
    assert [report["dtype"] for report in reports] == ["float32", "bfloat16"]
    ppls = [[row["ppl"] for row in report["rows"]] for report in reports]
    assert ppls[0] != ppls[1]
    assert ppls[0] == pytest.approx(ppls[1], rel=0.05)


def test_several_targets_are_scored_by_tail_alone(evaluate):
    row = json.loads(evaluate("--json", "--protocol", "tail", "--targets", 7).out)["rows"][0]
    assert row["tokens"] == 12 * 7
    assert evaluate("--targets", 7).code == 2


WRONG = {
    "a dtype that is not known": (["--dtype", "int8"], "int8"),
    "a GPU that is not there": (["--device", "cuda"], "--device cuda"),
    "a device that is not known": (["--device", "abacus"], "--device abacus"),
    "a device without numbers": (["--device", "meta"], "--device meta"),
    "a protocol that is not known": (["--protocol", "middle"], "prefix, tail"),
    "targets that do not fit": (["--protocol", "tail", "--targets", "24"], "24 target"),
    "no documents wanted": (["--max-documents", "0"], "--max-documents"),
}


def is_one_message(outcome, expected):
    assert outcome.code == 2
    assert outcome.out == ""
    assert expected in " ".join(outcome.err.split())
    assert "Traceback" not in outcome.err
    assert outcome.err.lower().count("error") == 1


@pytest.mark.parametrize(("options", "expected"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_option_is_one_message(evaluate, monkeypatch, options, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    is_one_message(evaluate(*options), expected)


@pytest.mark.parametrize("lengths", ["", ",", "a,b", "0", "-5", "1", "2.5", "1" + "0" * 400, "24;64"])
def test_wrong_lengths_are_one_message(evaluate, lengths):
    is_one_message(evaluate(lengths=lengths), "length")


def test_lengths_beyond_all_documents_are_one_message(evaluate):
    is_one_message(evaluate(lengths="24,100000"), "No document is as long as 100000 tokens")


@pytest.mark.parametrize("data", ["nowhere", "no/where", "x" * 300, ""])
def test_data_that_is_not_there_is_one_message(evaluate, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    is_one_message(evaluate(data=data), data[:50])


@pytest.mark.parametrize("text", ["", "b"], ids=["empty", "of one token"])
def test_a_document_that_is_too_short_to_score_is_one_message(evaluate, tmp_path, text):
    (tmp_path / "tiny.txt").write_text(text)
    is_one_message(evaluate(data=tmp_path / "tiny.txt", lengths="2"), "No document is as long as 2 tokens")


@pytest.mark.parametrize("name", ["nowhere", "no/where/at/all"])
def test_a_checkpoint_that_is_not_there_is_one_message(evaluate, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    is_one_message(evaluate(checkpoint=name), name)


def test_a_report_that_cannot_be_written_is_one_message(evaluate, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    is_one_message(evaluate("--output", tmp_path / "file" / "report.json"), "be written")
    is_one_message(evaluate("--output", tmp_path / "folder"), "be written")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_a_report_that_cannot_be_written_is_known_before_the_model_runs(evaluate, tmp_path, monkeypatch):
    """Hours may lie between."""
    from ropecli.evaluate import perplexity

    def run(*arguments, **options):
        raise AssertionError("the model ran")

    monkeypatch.setattr(perplexity, "evaluate_perplexity", run)
    (tmp_path / "file").write_text("")
    assert evaluate("--output", tmp_path / "file" / "report.json").code == 2
