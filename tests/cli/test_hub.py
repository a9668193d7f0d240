"""Hub ids instead of folders: the Hub's own client against a small server with the same protocol."""

import json
import re
import shutil

import pytest
import torch
import yaml
from completions_server import CompletionsServer
from fake_hub import MAIN, NAME, OLD, RefusalError, Repository

YARN = ["--method", "yarn", "--factor", 4, "--no-verify"]
OFFLINE = "huggingface_hub.constants.HF_HUB_OFFLINE"


# What is downloaded.


@pytest.mark.parametrize("command", [["inspect"], ["patch", *YARN[:-1], "--dry-run"]], ids=["inspect", "dry-run"])
def test_looking_downloads_the_config_files_alone(command, hub, ropecli, llama):
    name, *options = command
    remote, local = (ropecli(name, checkpoint, *options, "--json").json() for checkpoint in (NAME, llama))
    assert json.loads(json.dumps(remote).replace(NAME, str(llama))) == local
    assert hub.files_of("HEAD") == hub.files_of("GET") == {"config.json", "tokenizer_config.json"}


def test_patching_downloads_a_checkpoints_files_and_no_more(hub, ropecli, llama, tmp_path):
    ropecli("patch", NAME, *YARN, "-o", tmp_path / "out").succeeds()
    names = {path.name for path in llama.iterdir()}
    assert hub.files_of("GET") == names | {"modeling_own.py"}  # whether code is named is not known yet
    assert {path.name for path in (tmp_path / "out").iterdir()} == names | {"ropecli.yaml"}


def test_a_server_needs_no_weights(hub, ropecli, llama, corpus, tokenizer):
    server = CompletionsServer(
        lambda ids: torch.zeros(len(ids), len(tokenizer)), like="vllm", most=64, tokenizer=tokenizer
    )
    options = ["--data", corpus, "--lengths", 24, "--max-documents", 2, "--json"]
    with server.running():
        report = ropecli("eval-ppl", NAME, *options, "--endpoint", server.url).report()
    assert report["weights"] == f"commit:{MAIN}"
    assert "tokenizer.json" in hub.files_of("GET")
    assert "model.safetensors" not in hub.files_of("GET")


def test_a_patch_links_the_caches_blobs_and_outlives_them(hub, ropecli, cache, llama, tmp_path):
    output = tmp_path / "out"
    assert "copied" not in ropecli("patch", NAME, *YARN, "-o", output).succeeds().err
    snapshot = cache / "models--owner--tiny" / "snapshots" / MAIN
    assert (snapshot / "model.safetensors").is_symlink()
    assert not any(path.is_symlink() for path in output.iterdir())
    assert (output / "model.safetensors").stat().st_ino == (snapshot / "model.safetensors").resolve().stat().st_ino
    assert not (output / "tokenizer.json").samefile(snapshot / "tokenizer.json")
    shutil.rmtree(cache)
    assert (output / "model.safetensors").read_bytes() == (llama / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("revision", "commit", "length"), [("main", MAIN, 64), ("v1", OLD, 32), (OLD, OLD, 32)])
def test_a_revision_is_read_and_recorded(hub, ropecli, tmp_path, revision, commit, length):
    ropecli("patch", NAME, "--revision", revision, *YARN, "-o", tmp_path / "out").succeeds()
    record = yaml.safe_load((tmp_path / "out" / "ropecli.yaml").read_text())
    assert record["original_max_position_embeddings"] == length
    # no digest: the commit identifies the weights, so that a patch need not read them
    assert record["source"] == {"checkpoint": NAME, "revision": revision, "commit": commit}


def test_a_revision_that_cannot_be_is_refused_without_a_request(hub, ropecli):
    for revision in ("", "../../etc/passwd", "a b"):
        ropecli("inspect", NAME, "--revision", revision).is_refused("expected a branch, tag or commit")
    assert hub.requests == []


# What goes wrong.

WRONG = {
    "missing": "it was not found on the Hub. Check the name; if it is private, log in with `hf auth",
    "gated": "gated on the Hub. Request access at http://127.0.0.1",
    "revision": "it has no revision v9 on the Hub",
    "token": "log in with `hf auth login`",
    "down": "the Hub answered with status 503",
    "network": "cannot be reached",
    "offline": "HF_HUB_OFFLINE is set",
}
REFUSALS = {"gated": RefusalError(403, "GatedRepo"), "token": RefusalError(401), "down": RefusalError(503)}


@pytest.mark.parametrize("what", WRONG)
def test_why_the_hub_gave_nothing(what, hub, ropecli, tmp_path, monkeypatch):
    options = [*YARN, "-o", tmp_path / "out"]
    hub.refusal = REFUSALS.get(what)
    if what == "missing":
        hub.repositories.clear()
    elif what == "revision":
        options += ["--revision", "v9"]
    elif what == "network":
        hub.cut()
    elif what == "offline":
        monkeypatch.setattr(OFFLINE, True)
    ropecli("patch", NAME, *options).is_refused(f"error: {NAME} is not a local folder, ", WRONG[what])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("way", ["offline", "network"])
def test_the_cache_needs_no_hub(way, hub, ropecli, tmp_path, monkeypatch):
    ropecli("patch", NAME, *YARN, "-o", tmp_path / "before").succeeds()
    if way == "offline":
        monkeypatch.setattr(OFFLINE, True)
    else:
        hub.cut()
    hub.requests.clear()
    ropecli("inspect", NAME).succeeds()
    ropecli("patch", NAME, *YARN, "-o", tmp_path / "after").succeeds()
    records = [(tmp_path / folder / "ropecli.yaml").read_bytes() for folder in ("before", "after")]
    assert records[0] == records[1]
    assert not any("/resolve/" in path for _, path in hub.requests)


def test_a_cache_without_weights_is_completed_by_a_download(hub, ropecli, tmp_path, monkeypatch):
    ropecli("inspect", NAME).succeeds()
    monkeypatch.setattr(OFFLINE, True)
    refused = ropecli("patch", NAME, *YARN, "-o", tmp_path / "out")
    refused.is_refused("only partly in the Hub's cache", "hf download owner/tiny")


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
    tables = {name: [{"text": body} for body in bodies] for name, bodies in rows.items()}
    question = {"role": "user", "content": "?"}
    tables["chat"] = [{"messages": [question, {"role": "assistant", "content": body}]} for body in bodies]
    files = {f"{name}.jsonl": "\n".join(map(json.dumps, table)).encode() for name, table in tables.items()}
    hub.repositories[TEXTS] = Repository({"main": MAIN}, {MAIN: {"README.md": CARD.encode(), **files}})
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", hub.url)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return rows


def test_a_configuration_is_named_after_the_dataset(texts, ropecli, llama):
    from ropecli.data.sources import Source

    for config in ("en", "de"):
        assert [text for _, text in Source(f"{TEXTS}:{config}").texts()] == texts[config]
    outcome = ropecli("eval-ppl", llama, "--data", f"{TEXTS}:de", "--lengths", 32, "--json")
    report = outcome.report()
    assert (report["source"], report["rows"][0]["documents"]) == (f"{TEXTS}:de", len(texts["de"]))
    assert "Reading at most 10,000 documents of owner/texts:de. To read more, set --max-documents." in outcome.err
    for name in (TEXTS, f"{TEXTS}:fr"):
        message = f"Name one after a colon, --data {TEXTS}:CONFIG."
        ropecli("eval-ppl", llama, "--data", name).is_refused("'en', 'de', 'chat'", message)


def test_a_dataset_is_read_up_to_a_number_of_documents(texts, ropecli, llama, tmp_path, monkeypatch):
    from ropecli.data import sources

    monkeypatch.setattr(sources, "HUB_DOCUMENTS", 3)
    data = ["--data", f"{TEXTS}:en"]
    counts = []
    for options in ([], ["--max-documents", 5]):
        report = ropecli("eval-ppl", llama, *data, "--lengths", 32, "--json", *options).report()
        counts.append(report["rows"][0]["documents"])
    assert counts == [3, 5]
    said = []
    for number, options in enumerate([[], ["--set", "max_documents=5"]]):
        training = ["--steps", 1, "--length", 16, "--set", "gradient_accumulation=1", *options]
        said.append(ropecli("finetune", llama, *data, *training, "-o", tmp_path / str(number)).succeeds().err)
    assert "Reading at most 3 documents of owner/texts:en. To read more, set max_documents." in said[0]
    assert "Reading at most" not in said[1]
    assert [int(re.search(r"(\d+) documents", text[text.index("owner/texts:en:") :])[1]) for text in said] == [3, 5]


def test_tokens_are_kept_for_a_commit_and_offline_those_of_the_last_one_are_used(texts, hub, tmp_path, monkeypatch):
    from ropecli.data.files import UnreachableError
    from ropecli.data.sources import Source
    from ropecli.data.token_store import last_seen_files, source_identity

    def identity(config):
        source = Source(f"{TEXTS}:{config}")
        return json.dumps(source_identity(source, last_seen_files(source, tmp_path / "seen")))

    first = identity("en")
    assert (f"{MAIN}/en.jsonl" in first, identity("de") != first) == (True, True)
    repository = hub.repositories[TEXTS]
    hub.repositories[TEXTS] = Repository({"main": OLD}, {OLD: repository.files[MAIN]})
    second = identity("en")
    assert f"{OLD}/en.jsonl" in second
    hub.cut()
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("waiting for a Hub that is cut off"))
    assert identity("en") == second
    with pytest.raises(UnreachableError):
        identity("chat")
