"""ropecli eval-ppl: one JSON document or one message, whatever is asked."""

import json
import math

import pytest
import torch

FIELDS = {
    "schema_version": int,
    "task": str,
    "checkpoint": str,
    "digest": str,
    "method": str,
    "factor": float,
    "params": dict,
    "in_memory": bool,
    "original_max_position_embeddings": int,
    "source": str,
    "command": list,
    "settings": dict,
    "fingerprint": str,
    "too_short": int,
    "dtype": str,
    "device": str,
    "cells": list,
    "rows": list,
    "document_names": list,
    "baseline": type(None),
    "headlines": list,
    "environment": dict,
    "kind": str,
}
ROW_FIELDS = {
    "length",
    "ppl",
    "nll",
    "ppl_low",
    "ppl_high",
    "bits_per_byte",
    "tokens",
    "documents",
    "seconds",
    "tokens_per_second",
    "peak_memory",
}


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
    assert (report["schema_version"], report["kind"]) == (3, "perplexity")
    assert (report["method"], report["task"], report["headlines"]) == ("none", "prefix", [])
    assert report["settings"] == {
        "stride": None,
        "targets": None,
        "chunk": None,
        "batch_size": 1,
        "attn": "auto",
        "processes": 1,
    }
    command = ["ropecli", "eval-ppl", str(llama), "--data", str(corpus), "--lengths", "24,64", "--json"]
    assert report["command"] == command
    assert (report["checkpoint"], report["source"]) == (str(llama), str(corpus))
    assert {"ropecli", "torch", "transformers", "python"} <= report["environment"].keys()
    assert report["document_names"] == sorted(path.name for path in corpus.iterdir())


def test_rows_hold_their_numbers(evaluate):
    report = json.loads(evaluate("--json", "--max-documents", 5, lengths="64,24,24").out)
    assert [row["length"] for row in report["rows"]] == [24, 64]
    for row, cell in zip(report["rows"], report["cells"], strict=True):
        assert row.keys() == ROW_FIELDS
        assert row["documents"] == len(cell["sums"]) == len(report["document_names"]) == 5
        assert row["tokens"] == 5 * (row["length"] - 1)
        assert row["nll"] == pytest.approx(sum(cell["sums"]) / row["tokens"])
        assert row["ppl"] == pytest.approx(math.exp(row["nll"]))
        assert row["ppl_low"] <= row["ppl"] <= row["ppl_high"]
        assert cell["weights"] == [row["length"] - 1] * 5
        assert sum(bucket["tokens"] for bucket in cell["by_context"]) == row["tokens"]
        assert [bucket["start"] for bucket in cell["by_context"]][:7] == [1, 2, 3, 4, 6, 8, 12]
        assert min(row["seconds"], row["tokens_per_second"], row["peak_memory"]) > 0


def test_documents_left_out_are_counted_and_said(evaluate, corpus, tmp_path):
    (tmp_path / "short.txt").write_text("ba")
    (tmp_path / "long.txt").write_text((corpus / "text00.txt").read_text())
    outcome = evaluate("--json", data=tmp_path)
    assert json.loads(outcome.out)["too_short"] == 1
    assert "1 document" in outcome.err


@pytest.fixture
def few(corpus, tmp_path):
    """Three documents of 200 tokens and more, of some 40 and of two."""
    folder = tmp_path / "few"
    folder.mkdir()
    text = (corpus / "text00.txt").read_text()
    for name, characters in (("a", 900), ("b", 120), ("c", 2)):
        (folder / f"{name}.txt").write_text(text[:characters])
    return folder


@pytest.mark.parametrize("protocol", ["sliding", "disjoint"])
def test_whole_documents_are_all_scored_and_short_ones_are_told_of(evaluate, few, tokenizer, protocol):
    tokens = [len(tokenizer((few / f"{name}.txt").read_text())["input_ids"]) for name in "abc"]
    assert tokens[0] > 100 > 64 > tokens[1] > 24 > tokens[2] >= 2
    outcome = evaluate("--json", "--protocol", protocol, data=few, lengths="24,100")
    report = json.loads(outcome.out)
    assert (report["document_names"], report["too_short"]) == (["a.txt", "b.txt", "c.txt"], 0)
    assert "2 documents shorter than 100 tokens: scored with less context" in " ".join(outcome.err.split())
    first = protocol == "sliding"
    assert [row["tokens"] for row in report["rows"]] == [sum(tokens) - 3 * first] * 2
    assert report["cells"][0]["weights"] == [count - first for count in tokens]


def test_whole_documents_can_be_left_out_and_cut(evaluate, few):
    outcome = evaluate(
        "--json", "--protocol", "sliding", "--min-tokens", 30, "--max-tokens", 90, data=few, lengths="24,60"
    )
    report = json.loads(outcome.out)
    assert (report["document_names"], report["too_short"]) == (["a.txt", "b.txt"], 1)
    assert report["cells"][0]["weights"][0] == 89
    said = " ".join(outcome.err.split())
    assert "Skipping 1 document shorter than 30 tokens" in said
    assert "1 document shorter than 60 tokens: scored with less context" in said
    nothing = evaluate("--protocol", "sliding", "--min-tokens", 30, "--max-documents", 1, data=few)
    assert "shorter" not in nothing.err


WRONG = {
    "a GPU that is not there": (["--device", "cuda"], "--device cuda"),
    "a protocol that is not known": (["--protocol", "middle"], "prefix, tail"),
    "a stride of prefix": (["--stride", "5"], "stride applies only to the protocol sliding, not to prefix"),
    "few tokens of prefix": (["--min-tokens", "5"], "--min-tokens and --max-tokens apply to whole documents"),
    "more tokens than there are": (["--min-tokens", "100000", "--protocol", "yarn"], "at least 100000 tokens"),
    "an attention that is not known": (["--attn", "flash"], "--attn is 'flash'; expected one of auto, sdpa, eager"),
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


def test_wrong_lengths_are_one_message(evaluate):
    for lengths in ("", "a,b", "1", "2.5"):
        is_one_message(evaluate(lengths=lengths), "length")
    is_one_message(evaluate(lengths="24,100000"), "No document has at least 100000 tokens")


def test_a_document_that_is_too_short_to_score_is_one_message(evaluate, tmp_path):
    (tmp_path / "tiny.txt").write_text("b")
    for protocol in ("prefix", "disjoint"):
        outcome = evaluate("--protocol", protocol, data=tmp_path / "tiny.txt", lengths="2")
        is_one_message(outcome, "No document has at least 2 tokens")


def test_a_table_without_its_column_is_one_message(evaluate, tmp_path, corpus):
    body = json.dumps({"body": (corpus / "text00.txt").read_text()})
    (tmp_path / "rows.jsonl").write_text(body + "\n")
    is_one_message(evaluate(data=tmp_path / "rows.jsonl"), "no text in column 'text'. Available columns: body")
    assert evaluate("--text-column", "body", data=tmp_path / "rows.jsonl").code == 0


@pytest.fixture
def with_weights(llama, tmp_path):
    """with_weights(change) -> a copy of the checkpoint with other weights."""
    import shutil

    from safetensors.torch import load_file, save_file

    def make(change):
        folder = shutil.copytree(llama, tmp_path / "changed")
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return folder

    return make


@pytest.mark.parametrize(
    ("options", "address", "warned"),
    [
        (["--cpu", "--num_processes", "2"], None, True),
        (["--cpu", "--num_processes", "1"], None, False),
        (["--cpu", "--num_processes", "1"], "node17", False),  # as exported by a cluster's script
    ],
)
def test_accelerate_launch_that_starts_one_process_instead_of_several(
    ropecli, llama, corpus, monkeypatch, options, address, warned
):
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    if address:
        monkeypatch.setenv("MASTER_ADDR", address)
    launch, *_ = _validate_launch_command(launch_command_parser().parse_args([*options, "-m", "ropecli"]))
    _, environment = prepare_simple_launcher_cmd_env(launch)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    outcome = ropecli("eval-ppl", llama, "--data", corpus, "--lengths", 32, "--max-documents", 1)
    assert outcome.code == 0
    assert ("accelerate launch started one process" in outcome.err) == warned
    assert ("torchrun --nproc_per_node N -m ropecli" in outcome.err) == warned
