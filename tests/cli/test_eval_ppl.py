"""ropecli eval-ppl: one JSON document or one message, whatever is asked."""

import json

import pytest
from outcomes import is_one_message

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


def test_json_is_all_that_is_on_standard_output(evaluate, llama, corpus):
    outcome = evaluate("--json", lengths="24,64")
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
    command = [
        "ropecli",
        "eval-ppl",
        str(llama),
        "--data",
        str(corpus),
        "--lengths",
        "24,64",
        "--max-documents",
        "4",
        "--json",
    ]
    assert report["command"] == command
    assert (report["checkpoint"], report["source"]) == (str(llama), str(corpus))
    assert {"ropecli", "torch", "transformers", "python"} <= report["environment"].keys()
    assert report["document_names"] == sorted(path.name for path in corpus.iterdir())[:4]


def test_documents_left_out_are_counted_and_said(evaluate, corpus, tmp_path):
    (tmp_path / "short.txt").write_text("ba")
    (tmp_path / "long.txt").write_text((corpus / "text00.txt").read_text())
    outcome = evaluate("--json", data=tmp_path, lengths="24,64")
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


def test_a_document_that_is_too_short_to_score_is_one_message(evaluate, tmp_path):
    (tmp_path / "tiny.txt").write_text("b")
    for protocol in ("prefix", "disjoint"):
        outcome = evaluate("--protocol", protocol, data=tmp_path / "tiny.txt", lengths="2")
        is_one_message(outcome, "No document has at least 2 tokens")


def test_a_table_without_its_column_is_one_message(evaluate, tmp_path, corpus):
    body = json.dumps({"body": (corpus / "text00.txt").read_text()})
    (tmp_path / "rows.jsonl").write_text(body + "\n")
    is_one_message(
        evaluate(data=tmp_path / "rows.jsonl", lengths="24"), "no text in column 'text'. Available columns: body"
    )
    assert evaluate("--text-column", "body", data=tmp_path / "rows.jsonl", lengths="24").code == 0


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
