"""`ropecli push`: a folder and its model card on the Hub, against a small server that speaks the Hub's protocol."""

import json
import os
import signal
from pathlib import Path

import pytest
import yaml
from fake_hub import MAIN, NAME, cut, offline
from huggingface_hub import ModelCard

YARN = ["--method", "yarn", "--factor", 4, "--no-verify"]
NEW = "me/tiny-256"
LONG = "x" * 300
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
def patched(llama, ropecli, tmp_path) -> Path:
    """A checkpoint patched from a local folder."""
    assert ropecli("patch", llama, *YARN, "-o", tmp_path / "local").code == 0
    return tmp_path / "local"


@pytest.fixture
def sharded(llama, ropecli, tmp_path) -> Path:
    """The same with three weight files or more."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(llama).save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    AutoTokenizer.from_pretrained(llama).save_pretrained(tmp_path / "shards")
    assert ropecli("patch", tmp_path / "shards", *YARN, "-o", tmp_path / "sharded").code == 0
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    return tmp_path / "sharded"


def card_of(hub, name: str) -> ModelCard:
    return ModelCard(hub.newest(name)["README.md"].decode())


def test_a_patch_of_a_hub_model_is_pushed_without_sending_its_weights(writable, ropecli, tmp_path):
    ropecli("patch", NAME, *YARN, "-o", tmp_path / "out")
    outcome = ropecli("push", tmp_path / "out", "--repo", NEW, "--json")
    assert outcome.code == 0, outcome.err
    printed = json.loads(outcome.out)
    assert {one["name"]: one["status"] for one in printed["files"]}["model.safetensors"] == "copied"
    assert writable.uploads == []
    assert printed["private"] is writable.repositories[NEW].private is True
    pushed = writable.newest(NEW)
    for path in (tmp_path / "out").iterdir():
        assert path.name == "README.md" or pushed[path.name] == path.read_bytes()
    assert set(pushed) - {path.name for path in (tmp_path / "out").iterdir()} == {".gitattributes"}
    assert json.loads(ropecli("inspect", NEW, "--json").out)["target_length"] == 256


def test_the_metadata_name_the_base_and_keep_its_licence(writable, ropecli, tmp_path):
    ropecli("patch", NAME, *YARN, "-o", tmp_path / "out")
    assert ropecli("push", tmp_path / "out", "--repo", NEW).err == ""
    card = card_of(writable, NEW)
    assert (card.data.base_model, card.data.license, card.data.library_name) == (NAME, "apache-2.0", "transformers")
    assert card.data.language == ["en", "no"]  # YAML 1.1 reads Norwegian as false
    assert "base_model_relation" not in card.data  # the weights are the same
    assert card.text.count("A notice.") == 1
    assert f"[{NAME}](https://huggingface.co/{NAME}/tree/{MAIN})" in card.text


def test_where_the_hub_cannot_copy_weights_are_sent(writable, ropecli, tmp_path):
    ropecli("patch", NAME, *YARN, "-o", tmp_path / "out")
    writable.copies = False
    outcome = ropecli("push", tmp_path / "out", "--repo", NEW)
    assert outcome.code == 0, outcome.err
    assert len(writable.uploads) == 1


def test_a_second_push_sends_what_changed(writable, ropecli, patched):
    assert ropecli("push", patched, "--repo", NEW).code == 0
    assert len(writable.uploads) == 1
    before = len(writable.repositories[NEW].files)
    again = json.loads(ropecli("push", patched, "--repo", NEW, "--json").out)
    assert (again["commit"], {one["status"] for one in again["files"]}) == (None, {"unchanged"})
    (patched / "LICENSE").write_text("do as you like")
    once_more = json.loads(ropecli("push", patched, "--repo", NEW, "--json").out)
    assert [one["name"] for one in once_more["files"] if one["status"] == "uploaded"] == ["LICENSE"]
    assert (len(writable.uploads), len(writable.repositories[NEW].files)) == (1, before + 1)


def test_after_ctrl_c_only_the_rest_is_sent(writable, ropecli, sharded):
    def press() -> None:
        if len(writable.uploads) == 1:
            writable.on_upload = lambda: None
            os.kill(os.getpid(), signal.SIGINT)

    writable.on_upload = press
    outcome = ropecli("push", sharded, "--repo", NEW)
    assert outcome.code == 130
    assert "Run the same command again" in outcome.err
    assert set(writable.newest(NEW)) == {".gitattributes"}  # no half checkpoint
    done = ropecli("push", sharded, "--repo", NEW)
    assert done.code == 0, done.err
    shards = sorted(path.name for path in sharded.glob("*.safetensors"))
    assert len(writable.uploads) == len(set(writable.uploads)) == len(shards)
    assert all(writable.newest(NEW)[name] == (sharded / name).read_bytes() for name in shards)


def test_a_dry_run_asks_nobody_and_leaves_out_what_is_no_checkpoint(writable, ropecli, patched, contents):
    for name in ("checkpoints", "logs"):
        (patched / name).mkdir()
        (patched / name / "state.safetensors").write_bytes(b"x")
    for name in ("metrics.jsonl", "run.log", ".hidden.json", "optimizer.bin", *PRIVATE):
        (patched / name).write_bytes(b"{}")
    before = contents(patched)
    writable.requests.clear()
    outcome = ropecli("push", patched, "--repo", NEW, "--dry-run", "--json")
    printed = json.loads(outcome.out)
    assert writable.requests == []
    assert contents(patched) == before
    assert Path(printed["card"]) == patched.with_name("local.README.md")
    sizes = {path.name: path.stat().st_size for path in patched.iterdir() if path.name in PUSHED}
    sizes["README.md"] = Path(printed["card"]).stat().st_size
    assert {one["name"]: one["size"] for one in printed["files"]} == sizes
    assert "The base model's Hub id is unknown" in outcome.err
    assert "The license is unknown" in outcome.err
    assert f"Not uploaded: {', '.join(sorted(PRIVATE))}. To upload one of them, add --include NAME." in outcome.err
    named = ropecli("push", patched, "--repo", NEW, "--dry-run", "--base-model", "owner/other")
    assert ModelCard.load(printed["card"]).data.base_model == "owner/other"
    assert "model.safetensors" in named.out


PRIVATE = ("credentials.json", "trainer_state.json", "notes.txt", "training_config.json")
PUSHED = ("config.json", "ropecli.yaml", "generation_config.json", "model.safetensors", "tokenizer.json")
PUSHED += ("tokenizer_config.json",)


# fmt: off
PUBLIC = [
    "config.json", "generation_config.json", "configuration.json", "params.json", "ropecli.yaml",
    "model.safetensors", "tune.json", "factors.json", "model.safetensors.index.json",
    "model-00001-of-00002.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt",
    "merges.txt", "added_tokens.json", "special_tokens_map.json", "tokenizer.model", "tiktoken.model",
    "qwen.tiktoken", "tekken.json", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json", "chat_template.json", "chat_template.jinja", "quantize_config.json",
    "hf_quant_config.json", "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json",
    "README.md", "LICENSE", "license.txt", "NOTICE", "NOTICE.txt", "USE_POLICY.md"
]
# fmt: on


def test_all_that_a_checkpoint_needs_is_pushed(tmp_path):
    from ropecli.checkpoint.opening import Checkpoint
    from ropecli.checkpoint.upload import files_to_push

    for name in (*PUBLIC, *PRIVATE, "optimizer.safetensors"):
        (tmp_path / name).write_text("{}")
    assert set(files_to_push(Checkpoint("folder", tmp_path, {}))) == set(PUBLIC)


@pytest.mark.parametrize(
    "entry",
    [
        {"source": 5},
        {"source": {"checkpoint": LONG, "commit": None, "digest": "0"}},
        {"source": {"checkpoint": "owner/tiny", "commit": "\ud800"}},
        {"source": None, "finetuned": "x"},
        {"source": None, "merged": [1], "finetuned": {"source": [1], "recipe": 3}},
        {"tuned": {"level": "\ud800`", "data": "x", "points": 1, "weights_changed": True, "learned": 1, "steps": "x"}},
    ],
    ids=["a number", "a long name", "a surrogate", "a text", "lists", "tuned"],
)
def test_odd_entries_of_the_record_stop_no_push(entry, ropecli, patched):
    record = yaml.safe_load((patched / "ropecli.yaml").read_text())
    (patched / "ropecli.yaml").write_text(yaml.safe_dump({**record, **entry}))
    outcome = ropecli("push", patched, "--repo", NEW, "--dry-run")
    assert outcome.code == 0, outcome.err


def test_other_files_are_included_by_name_or_pattern(ropecli, patched, tmp_path):
    (tmp_path / "key.txt").write_text("secret")
    (patched / "1_Pooling").mkdir()
    for name in ("notes.txt", "1_Pooling/config.json", ".hidden.txt"):
        (patched / name).write_text("{}")

    def names(*patterns: str) -> set[str]:
        options = [word for pattern in patterns for word in ("--include", pattern)]
        outcome = ropecli("push", patched, "--repo", NEW, "--dry-run", "--json", *options)
        assert outcome.code == 0, outcome.err
        return {file["name"] for file in json.loads(outcome.out)["files"]}

    assert names("n*.txt", "1_Pooling/*") - names() == {"notes.txt", "1_Pooling/config.json"}
    (patched / "1_Pooling" / "link.txt").symlink_to(tmp_path / "key.txt")
    for pattern in ("absent.txt", "../key.txt", str(tmp_path / "key.txt"), "1_Pooling/link.txt", ""):
        outcome = ropecli("push", patched, "--repo", NEW, "--dry-run", "--include", pattern)
        assert outcome.code == 2
        assert "has no such file" in outcome.err


def test_the_origin_is_found_by_way_of_local_folders(writable, ropecli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ropecli("patch", NAME, *YARN, "-o", "once")
    ropecli("patch", "once", "--method", "linear", "--factor", 2, "--no-verify", "-o", "twice")
    ropecli("push", "twice", "--repo", NEW, "--dry-run")
    assert ModelCard.load(tmp_path / "twice.README.md").data.base_model == NAME
    (tmp_path / "once" / "config.json").write_text("{}")  # another checkpoint now
    ropecli("push", "twice", "--repo", NEW, "--dry-run")
    assert ModelCard.load(tmp_path / "twice.README.md").data.base_model is None


def test_a_report_of_other_weights_is_refused(ropecli, large, changed_amid, corpus, tmp_path):
    """They differ in one bit, in the middle of the file."""
    assert ropecli("patch", large, *YARN, "-o", tmp_path / "first").code == 0
    second, report = changed_amid(tmp_path / "first"), tmp_path / "report.json"
    measure = ["--data", corpus, "--max-documents", 2, "--lengths", "24", "--output", report]
    assert ropecli("eval-ppl", tmp_path / "first", *measure).code == 0
    push = ["--repo", NEW, "--report", report, "--dry-run"]
    assert ropecli("push", tmp_path / "first", *push).code == 0
    outcome = ropecli("push", second, *push)
    assert (outcome.code, outcome.out) == (2, "")
    assert f"is a report of {tmp_path / 'first'}, not of {second} as it is now (digest sha256:" in outcome.err


# What is refused.


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("stock", "has no ropecli.yaml: ropecli did not change this checkpoint. Upload it with: hf upload"),
        ("unfinished", "has an unfinished training run. Finish it with ropecli finetune --resume."),
        ("adapter", "is an adapter. Merge it with its base model: ropecli merge"),
        ("edited", "was edited after ropecli.yaml was written (max_position_embeddings)"),
        ("metadata", "README.md cannot become the model card: its metadata are a list"),
        ("missing", "is not a folder"),
        ("name", "--repo is 'tiny'; expected owner/name"),
        ("base", "--base-model is 'tiny'; expected owner/name"),
        ("itself", "which is the base model. Choose another repository."),
        ("token", "Log in with `hf auth login`, or set HF_TOKEN."),
        (
            "letters",
            "The Hub cannot be asked: the token in HF_TOKEN, or of `hf auth login`, has characters that are not",
        ),
        ("offline", "HF_HUB_OFFLINE is set, so nothing can be uploaded."),
        ("network", "cannot be reached"),
        ("public", f"{NEW} is public. Add --public to publish there"),
        ("others", f"{NEW} has old.safetensors, which this checkpoint does not have"),
    ],
)
def test_what_is_not_pushed(what, said, writable, ropecli, patched, llama, monkeypatch, tmp_path):
    options = {"name": ["--repo", "tiny"], "base": ["--repo", NEW, "--base-model", "tiny"]}.get(what, ["--repo", NEW])
    folder = {"stock": llama, "missing": tmp_path / "typo"}.get(what, patched)
    config = json.loads((patched / "config.json").read_text())
    if what == "unfinished":
        (patched / "run.yaml").write_text("{}")
        (patched / "config.json").unlink()
    elif what == "adapter":
        (patched / "model.safetensors").rename(patched / "adapter_model.safetensors")
        (patched / "adapter_config.json").write_text("{}")
    elif what == "edited":
        (patched / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 512}))
    elif what == "metadata":
        (patched / "README.md").write_text("---\n- a list\n---\n")
    elif what == "itself":
        options += ["--base-model", NEW]
    elif what == "token":
        monkeypatch.delenv("HF_TOKEN")
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    elif what == "letters":
        monkeypatch.setenv("HF_TOKEN", "hf_é")
    elif what == "offline":
        offline(monkeypatch)
    elif what == "network":
        cut(writable)
    elif what in ("public", "others"):
        assert ropecli("push", patched, *options, *(["--public"] if what == "public" else [])).code == 0
        writable.newest(NEW)["old.safetensors" if what == "others" else "x"] = b"x"
    sent = len(writable.uploads)
    outcome = ropecli("push", folder, *options)
    assert (outcome.code, outcome.out) == (2, "")
    assert said in outcome.err
    assert "Traceback" not in outcome.err
    assert len(writable.uploads) == sent


def test_the_token_is_never_printed(writable, ropecli, patched):
    """Not even if the server repeats it."""
    writable.writers.clear()
    outcome = ropecli("push", patched, "--repo", NEW)
    assert outcome.code == 2
    assert f"The Hub refused to write to {NEW} (status 403): <token> may not write to this repository." in outcome.err
    assert "a token with write access" in outcome.err
    assert TOKEN not in outcome.out + outcome.err


def test_metadata_that_the_hub_refuses(writable, ropecli, patched):
    (patched / "README.md").write_text("---\nlicense: [mit, 1.5]\n---\n")
    outcome = ropecli("push", patched, "--repo", NEW)
    assert outcome.code == 2
    assert "The Hub refused the metadata of README.md: license must be a string." in outcome.err
    assert writable.uploads == []


def test_the_record_of_the_push_needs_no_checkout(writable, ropecli, patched):
    """A pushed folder can be patched and reverted like any other."""
    ropecli("push", patched, "--repo", NEW, "--public")
    assert not writable.repositories[NEW].private
    outcome = ropecli("patch", NEW, "--revert", "--dry-run", "--json")
    assert outcome.code == 0, outcome.err
    assert yaml.safe_load(writable.newest(NEW)["ropecli.yaml"])["scaling"]["method"] == "yarn"
