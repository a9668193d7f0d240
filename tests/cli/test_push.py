"""`ropecli push`: a folder and its model card on the Hub, against a small server that speaks the Hub's protocol."""

from pathlib import Path

import pytest
from fake_hub import MAIN, NAME, RefusalError
from huggingface_hub import ModelCard

YARN = ["--method", "yarn", "--factor", 4, "--no-verify"]
NEW = "me/tiny-256"
TOKEN = "hf_mysecrettoken"
README = b"---\nlicense: apache-2.0\nlanguage: [en, no]\nbase_model: owner/older\n---\n# Tiny\n\nA notice.\n"


@pytest.fixture
def writable(hub, monkeypatch):
    """A Hub on which TOKEN may write; owner/tiny has a README.md."""
    hub.repositories[NAME].files[MAIN]["README.md"] = README
    hub.writers = {TOKEN}
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub


@pytest.fixture
def local(llama, ropecli, tmp_path) -> Path:
    """A checkpoint patched from a local folder."""
    ropecli("patch", llama, *YARN, "-o", tmp_path / "local").succeeds()
    return tmp_path / "local"


@pytest.fixture
def from_hub(writable, ropecli, tmp_path) -> Path:
    """A checkpoint patched from the Hub."""
    ropecli("patch", NAME, *YARN, "-o", tmp_path / "out").succeeds()
    return tmp_path / "out"


def card_of(hub, name: str) -> ModelCard:
    return ModelCard(hub.newest(name)["README.md"].decode())


def test_a_pushed_folder_can_be_used_like_any_other(writable, ropecli, from_hub, tmp_path):
    assert (from_hub / "README.md").read_bytes() == README
    printed = ropecli("push", from_hub, "--repo", NEW, "--json").json()
    assert printed["private"] is writable.repositories[NEW].private is True
    pushed, written = writable.newest(NEW), list(from_hub.iterdir())
    assert all(path.name == "README.md" or pushed[path.name] == path.read_bytes() for path in written)
    assert set(pushed) - {path.name for path in written} == {".gitattributes"}
    assert ropecli("inspect", NEW, "--json").json()["context_length"] == 256
    ropecli("revert", NEW, "--dry-run").succeeds()
    # the section of the card is replaced
    ropecli("patch", NEW, "--method", "linear", "--factor", 2, "--no-verify", "-o", tmp_path / "twice").succeeds()
    ropecli("push", tmp_path / "twice", "--repo", "me/twice").succeeds()
    text = card_of(writable, "me/twice").text
    assert [text.count(part) for part in ("ropecli:begin", "with linear", "with yarn", "A notice.")] == [1, 1, 0, 1]


def test_the_metadata_name_the_base_and_keep_its_licence(writable, ropecli, from_hub):
    assert "warning" not in ropecli("push", from_hub, "--repo", NEW).succeeds().err
    card = card_of(writable, NEW)
    assert (card.data.base_model, card.data.license, card.data.library_name) == (NAME, "apache-2.0", "transformers")
    assert card.data.language == ["en", "no"]  # YAML 1.1 reads Norwegian as false
    assert "base_model_relation" not in card.data  # the weights are the same
    assert card.text.count("A notice.") == 1
    assert f"[{NAME}](https://huggingface.co/{NAME}/tree/{MAIN})" in card.text


def test_after_a_failure_the_same_command_continues(writable, ropecli, local):
    def fail() -> None:
        raise RefusalError(403)

    writable.on_upload = fail
    outcome = ropecli("push", local, "--repo", NEW)
    assert (outcome.code, outcome.out) == (2, "")
    assert "The same command sends only what the Hub does not have." in outcome.err  # after the client's progress bar
    assert set(writable.newest(NEW)) == {".gitattributes", "README.md"}  # the card came first
    writable.on_upload = lambda: None
    ropecli("push", local, "--repo", NEW).succeeds()
    assert writable.newest(NEW)["model.safetensors"] == (local / "model.safetensors").read_bytes()


def test_a_dry_run_sends_no_request_and_skips_what_is_no_checkpoint(writable, ropecli, local, contents):
    for name in ("checkpoints", "logs"):
        (local / name).mkdir()
        (local / name / "state.safetensors").write_bytes(b"x")
    for name in ("metrics.jsonl", "run.log", "optimizer.bin", *PRIVATE):
        (local / name).write_bytes(b"{}")
    before = contents(local)
    outcome = ropecli("push", local, "--repo", NEW, "--dry-run", "--json")
    printed = outcome.json()
    assert writable.requests == []
    assert contents(local) == before
    assert list(local.parent.glob("local*")) == [local]
    sizes = {path.name: path.stat().st_size for path in local.iterdir() if path.name in PUSHED}
    sizes["README.md"] = len(printed["card"].encode())
    assert {one["name"]: one["size"] for one in printed["files"]} == sizes
    assert "The base model's Hub id is unknown" in outcome.err
    assert "The license is unknown" in outcome.err
    assert f"Not uploaded: {', '.join(sorted(PRIVATE))}. Upload one of them with: hf upload OWNER/NAME" in outcome.err
    (local / "LICENSE").write_text("do as you like")
    named = ropecli("push", local, "--repo", NEW, "--dry-run", "--verbose", "--base-model", "owner/other").succeeds()
    assert "model.safetensors" in named.out
    assert "\nbase_model: owner/other\n" in named.out
    assert "warning: LICENSE is uploaded, but the card does not name the license." in named.err


PRIVATE = ("credentials.json", "trainer_state.json", "notes.txt", "training_config.json")
PUSHED = ["config.json", "ropecli.yaml", "generation_config.json", "model.safetensors", "tokenizer.json"]
PUSHED += ["tokenizer_config.json"]


def test_the_base_of_a_training_in_stages_is_that_of_the_first(ropecli, local):
    (local / "run.yaml").write_text("source: {checkpoint: owner/first, commit: v1}\n")
    card = ropecli("push", local, "--repo", NEW, "--dry-run", "--json").json()["card"]
    assert ModelCard(card).data.base_model == "owner/first"


def test_a_report_of_other_weights_is_refused(ropecli, large, changed_amid, corpus, tmp_path):
    """They differ in one bit, in the middle of the file."""
    first, report = tmp_path / "first", tmp_path / "report.json"
    ropecli("patch", large, *YARN, "-o", first).succeeds()
    second = changed_amid(first)
    measure = ["--data", corpus, "--max-documents", 2, "--lengths", "24", "--output", report]
    ropecli("eval-ppl", first, *measure).succeeds()
    push = ["--repo", NEW, "--report", report, "--dry-run"]
    ropecli("push", first, *push).succeeds()
    message = f"has no measurement of {second} as it is now (digest sha256:"
    ropecli("push", second, *push).is_refused(message)


# What is refused.

WRONG = {
    "login": "Check the network, --repo, and the login: `hf auth login`, with a token that may write.",
    "public": f"{NEW} is public. Add --public to publish there",
    "old.safetensors": f"{NEW} has old.safetensors, which this checkpoint does not have",
    "adapter_config.json": f"{NEW} has adapter_config.json, which this checkpoint does not have",
    "token": "may not write to this repository. Check the network, --repo, and the login",
    "metadata": "Invalid metadata in README.md. - license must be a string",
}


@pytest.mark.parametrize("what", WRONG)
def test_nothing_is_sent(what, writable, ropecli, local, monkeypatch, tmp_path):
    push = ["push", local, "--repo", NEW]
    if what == "login":
        monkeypatch.delenv("HF_TOKEN")
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    elif what in ("public", "old.safetensors", "adapter_config.json"):
        ropecli(*push, *(["--public"] if what == "public" else [])).succeeds()
        writable.newest(NEW)[what] = b"x"
    elif what == "token":
        writable.writers.clear()
    else:
        (local / "README.md").write_text("---\nlicense: [mit, 1.5]\n---\n")
    sent = len(writable.uploads)
    ropecli(*push).is_refused(WRONG[what])
    assert len(writable.uploads) == sent
