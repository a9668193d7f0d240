"""Hub ids instead of folders: the Hub's own client against a small server with the same protocol."""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import yaml
from fake_hub import MAIN, NAME, OLD, RefusalError, Repository, cut, offline

CONFIGS = {"config.json", "tokenizer_config.json", "ropecli.yaml"}
YARN = ["--method", "yarn", "--factor", 4, "--no-verify"]


# What is fetched.


@pytest.mark.parametrize("command", [["inspect"], ["patch", *YARN[:-1], "--dry-run"]], ids=["inspect", "dry-run"])
def test_looking_fetches_the_config_files_alone(command, hub, ropecli, llama):
    name, *options = command
    outcome = ropecli(name, NAME, *options, "--json")
    assert outcome.code == 0, outcome.err
    shown = json.loads(outcome.out)
    there = json.loads(ropecli(name, llama, *options, "--json").out)
    assert {**shown, "checkpoint": ""} == {**there, "checkpoint": ""}
    assert hub.asked_for("HEAD") == CONFIGS
    assert hub.asked_for("GET") == {"config.json", "tokenizer_config.json"}


def test_patching_fetches_a_checkpoints_files_and_no_more(hub, ropecli, llama, tmp_path):
    assert ropecli("patch", NAME, *YARN, "-o", tmp_path / "out").code == 0
    names = {path.name for path in llama.iterdir()}
    assert hub.asked_for("GET") == names | {"modeling_own.py"}  # whether code is named is not known yet
    assert {path.name for path in (tmp_path / "out").iterdir()} == names | {"ropecli.yaml"}


def test_a_patch_links_the_caches_blobs_and_outlives_them(hub, ropecli, cache, llama, tmp_path):
    output = tmp_path / "out"
    outcome = ropecli("patch", NAME, *YARN, "-o", output)
    assert outcome.code == 0
    assert "copied" not in outcome.err
    snapshot = cache / "models--owner--tiny" / "snapshots" / MAIN
    assert (snapshot / "model.safetensors").is_symlink()
    assert not any(path.is_symlink() for path in output.iterdir())
    assert (output / "model.safetensors").stat().st_ino == (snapshot / "model.safetensors").resolve().stat().st_ino
    assert not (output / "tokenizer.json").samefile(snapshot / "tokenizer.json")
    shutil.rmtree(cache)
    assert (output / "model.safetensors").read_bytes() == (llama / "model.safetensors").read_bytes()


# Revisions.


def test_a_revision_is_read_and_recorded(hub, ropecli, tmp_path):
    windows = {}
    for revision in ("main", "v1", OLD):
        output = tmp_path / revision
        assert ropecli("patch", NAME, "--revision", revision, *YARN, "-o", output).code == 0
        note = yaml.safe_load((output / "ropecli.yaml").read_text())
        windows[revision] = note["original_max_position_embeddings"]
        commit = MAIN if revision == "main" else OLD
        # no digest: the commit identifies the weights, so that a patch need not read them
        assert note["source"] == {"checkpoint": NAME, "revision": revision, "commit": commit}
    assert windows == {"main": 64, "v1": 32, OLD: 32}


def test_a_revision_of_what_is_not_on_the_hub_is_refused(ropecli, llama):
    for command, *options in (
        ("inspect",),
        ("patch", *YARN, "--dry-run"),
        ("patch", "--revert", "--dry-run"),
        ("eval-ppl", "--data", "demo"),
        ("compare", "--data", "demo"),
        ("finetune", "--data", "demo-train", "-o", "out"),
    ):
        outcome = ropecli(command, llama, *options, "--revision", "v1")
        assert (outcome.code, outcome.out) == (2, "")
        assert f"--revision is v1, but {llama} is a local checkpoint" in outcome.err


def test_what_can_be_no_revision(hub, ropecli):
    for revision in ("", "../../etc/passwd", "a b", "a\nb"):
        outcome = ropecli("inspect", NAME, "--revision", revision)
        assert outcome.code == 2
        assert "expected a branch, tag or commit" in outcome.err
    assert hub.requests == []


# What goes wrong, each said in its own way.


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("missing", "it was not found on the Hub. Check the name; if it is private, log in with `hf auth"),
        ("gated", "gated on the Hub. Request access at http://127.0.0.1"),
        ("revision", "it has no revision v9 on the Hub"),
        ("token", "log in with `hf auth login`"),
        ("down", "the Hub answered with status 503"),
        ("network", "cannot be reached"),
        ("offline", "HF_HUB_OFFLINE is set"),
        ("letters", "the token in HF_TOKEN, or of `hf auth login`, has characters that are not ASCII"),
    ],
)
def test_why_the_hub_gave_nothing(what, named, hub, ropecli, cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = [*YARN, "-o", "out"]
    if what == "missing":
        hub.repositories.clear()
    elif what == "revision":
        options += ["--revision", "v9"]
    elif what == "network":
        cut(hub)
    elif what == "offline":
        offline(monkeypatch)
    elif what == "letters":
        monkeypatch.setenv("HF_TOKEN", "hf_é")
    else:
        hub.refusal = {"gated": RefusalError(403, "GatedRepo"), "token": RefusalError(401), "down": RefusalError(503)}[
            what
        ]
    outcome = ropecli("patch", NAME, *options)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith(f"error: {NAME} is not a local folder, ")
    assert named in outcome.err
    assert "Traceback" not in outcome.err
    assert not (tmp_path / "out").exists()


# Without a Hub.


@pytest.mark.parametrize("way", ["offline", "network"])
def test_what_is_in_the_cache_needs_no_hub(way, hub, ropecli, tmp_path, monkeypatch):
    before = ropecli("patch", NAME, *YARN, "-o", tmp_path / "before")
    assert before.code == 0
    if way == "offline":
        offline(monkeypatch)
    else:
        cut(hub)
    hub.requests.clear()
    assert ropecli("inspect", NAME).code == 0
    after = ropecli("patch", NAME, *YARN, "-o", tmp_path / "after")
    assert after.code == 0, after.err
    notes = [(tmp_path / folder / "ropecli.yaml").read_bytes() for folder in ("before", "after")]
    assert notes[0] == notes[1]
    assert not any("/resolve/" in path for _, path in hub.requests)


def test_a_cache_that_was_only_looked_at_holds_no_weights(hub, ropecli, tmp_path, monkeypatch):
    assert ropecli("inspect", NAME).code == 0
    offline(monkeypatch)
    outcome = ropecli("patch", NAME, *YARN, "-o", tmp_path / "out")
    assert outcome.code == 2
    assert "only partly in the Hub's cache" in outcome.err
    assert "hf download owner/tiny" in outcome.err


# As the environment says it, in a process of its own.


def test_the_clients_own_variables_are_followed(hub, cache):
    settings = {"HF_HOME": str(cache.parent), "NO_PROXY": "127.0.0.1", "COLUMNS": "200"}
    settings |= {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url}
    done = subprocess.run(
        [sys.executable, "-m", "ropecli", "inspect", NAME, "--json"],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["max_position_embeddings"] == 64
    assert hub.requests
    assert cache.is_dir()


# Datasets.

TEXTS = "owner/texts"
CARD = """---
configs:
- {config_name: en, data_files: [{split: train, path: en.jsonl}]}
- {config_name: de, data_files: [{split: train, path: de.jsonl}]}
- {config_name: chat, data_files: [{split: train, path: chat.jsonl}]}
---
"""


@pytest.fixture
def texts(hub, corpus, tmp_path, monkeypatch):
    """A dataset of three configurations on the Hub: the corpus, the same with capital letters, and as answers."""
    bodies = [path.read_text() for path in sorted(corpus.iterdir())]
    rows = {"en": bodies, "de": [body.upper() for body in bodies]}
    files = {
        f"{name}.jsonl": "".join(json.dumps({"text": body}) + "\n" for body in bodies).encode()
        for name, bodies in rows.items()
    }
    chats = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": body}] for body in bodies]
    files["chat.jsonl"] = "".join(json.dumps({"messages": messages}) + "\n" for messages in chats).encode()
    hub.repositories[TEXTS] = Repository({"main": MAIN}, {MAIN: {"README.md": CARD.encode(), **files}})
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", hub.url)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return rows


def test_a_configuration_is_named_after_the_dataset_or_by_its_option(texts, ropecli, llama):
    from ropecli.data.sources import read_texts

    for config in ("en", "de"):
        assert [text for _, text in read_texts(f"{TEXTS}:{config}")] == texts[config]
    outcome = ropecli("eval-ppl", llama, "--data", TEXTS, "--dataset-config", "de", "--lengths", 32, "--json")
    assert outcome.code == 0, outcome.err
    report = json.loads(outcome.out)
    assert (report["source"], report["rows"][0]["documents"]) == (f"{TEXTS}:de", len(texts["de"]))
    assert "Reading at most 10,000 documents of owner/texts:de. To read more, set --max-documents." in outcome.err
    for name, said in ((TEXTS, "has several configurations"), (f"{TEXTS}:fr", "has no configuration fr")):
        outcome = ropecli("eval-ppl", llama, "--data", name)
        assert outcome.code == 2
        assert f"{TEXTS} {said}. Choose one of en, de, chat, such as --data {TEXTS}:en." in outcome.err


def test_what_has_no_configuration(ropecli, llama, corpus):
    for command, data in (("eval-ppl", corpus), ("needle", "demo"), ("compare", "owner/texts:en")):
        outcome = ropecli(command, llama, "--data", data, "--dataset-config", "de")
        assert outcome.code == 2
        assert f"--dataset-config is 'de', but --data is {str(data)!r}; expected a Hub id" in outcome.err
    outcome = ropecli("finetune", llama, "--dataset-config", "de", "-o", "out")
    assert outcome.code == 2
    assert "--dataset-config is 'de'" in outcome.err


def test_a_dataset_is_read_up_to_a_number_of_documents(texts, ropecli, llama, tmp_path, monkeypatch):
    from ropecli.data import sources, stream

    monkeypatch.setattr(sources, "HUB_DOCUMENTS", 3)
    monkeypatch.setattr(stream, "HUB_DOCUMENTS", 3)
    data = ["--data", f"{TEXTS}:en"]
    counts = []
    for options in ([], ["--max-documents", 5]):
        outcome = ropecli("eval-ppl", llama, *data, "--lengths", 32, "--json", *options)
        counts.append(json.loads(outcome.out)["rows"][0]["documents"])
    assert counts == [3, 5]
    said = []
    for number, options in enumerate([[], ["--set", "max_documents=5"]]):
        training = ["--steps", 1, "--length", 16, "--set", "gradient_accumulation=1", *options]
        outcome = ropecli("finetune", llama, *data, *training, "-o", tmp_path / str(number))
        assert outcome.code == 0, outcome.err
        said.append(outcome.err)
    assert "Reading at most 3 documents of owner/texts:en. To read more, set max_documents." in said[0]
    assert "Reading at most" not in said[1]
    assert [int(re.search(r"(\d+) documents", text[text.index("owner/texts:en:") :])[1]) for text in said] == [3, 5]


def test_a_mixture_of_compressed_files_texts_and_conversations(texts, ropecli, source, chat_template, tmp_path):
    (source / "chat_template.jinja").write_text(chat_template)
    rows = "".join(json.dumps({"text": body}) + "\n" for body in texts["en"])
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    sources = [{"data": str(tmp_path / "rows.jsonl.gz")}, {"data": f"{TEXTS}:de", "weight": 2, "max_documents": 4}]
    sources.append({"data": f"{TEXTS}:chat", "train_on": "assistant"})
    keys = {"mixture": sources, "steps": 1, "length": 16, "gradient_accumulation": 1}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(keys))
    outcome = ropecli("finetune", source, "--recipe", tmp_path / "recipe.yaml", "-o", tmp_path / "out")
    assert outcome.code == 0, outcome.err
    assert re.search(rf"{TEXTS}:chat.*tokens are trained on", outcome.err)
    for name, count in ((tmp_path / "rows.jsonl.gz", 12), (f"{TEXTS}:de", 4), (f"{TEXTS}:chat", 12)):
        assert re.search(rf"{re.escape(str(name))}.*{count} documents", outcome.err)
