"""Bad input, one row each: the command, the part of the one message that matters, and what is prepared for it.

A row's preparation writes files below the current folder, which has the checkpoint `source` (a tiny Llama),
`data.txt`, and a private file outside the checkpoint. Every command ends with exit status 2, one short message and no
traceback, and changes nothing on disk.
"""

import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

import ropecli

Prepare = Callable[[Path], object]
PRIVATE = "private/secret.json"
CONFIG, WEIGHTS, INDEX = "source/config.json", "source/model.safetensors", "source/model.safetensors.index.json"


def write(name: str, value: object) -> Prepare:
    """Write one file: bytes, text, or a value as JSON."""

    def prepare(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        text = value if isinstance(value, str | bytes) else json.dumps(value)
        path.write_bytes(text.encode() if isinstance(text, str) else text)

    return prepare


def edit(name: str, **values: object) -> Prepare:
    """Change keys of a JSON file."""
    return lambda folder: write(name, {**json.loads((folder / name).read_text()), **values})(folder)


def remove(name: str) -> Prepare:
    return lambda folder: (folder / name).unlink()


def link(name: str) -> Prepare:
    """Replace a file with a link to the private file, which would do as config.json, too."""
    return lambda folder: [(folder / name).unlink(missing_ok=True), (folder / name).symlink_to(folder / PRIVATE)]


def make(name: str, kind: str) -> Prepare:
    """Replace a file with something that is no file."""

    def prepare(folder: Path) -> None:
        path = folder / name
        path.unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "socket":
            with socket.socket(socket.AF_UNIX) as opened:
                opened.bind("socket")
            Path("socket").rename(path)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        else:
            path.mkdir()

    return prepare


def patched(*more: Prepare) -> Prepare:
    """Patch `source` to `patched`, then change that."""

    def prepare(folder: Path) -> None:
        ropecli.patch(folder / "source", method="yarn", factor=2, output=folder / "patched", no_verify=True)
        for change in more:
            change(folder)

    return prepare


def damaged_run(text: str) -> Prepare:
    """Leave the unfinished run `run`, with another run.yaml."""

    def prepare(folder: Path) -> None:
        settings = {"tracker": "none", "warmup_steps": 0}
        ropecli.finetune("source", data="data.txt", length=16, steps=1, output="run", settings=settings)
        (folder / "run" / "config.json").unlink()
        write("run/run.yaml", text)(folder)

    return prepare


def conversation(role: str, content: object, **fields: object) -> Prepare:
    def prepare(folder: Path) -> None:
        write("chat.jsonl", {"messages": [{"role": role, "content": content}], **fields})(folder)
        template = "{% for message in messages %}{{ message.role + ': ' + message.content }}{% endfor %}"
        write("source/chat_template.jinja", template)(folder)

    return prepare


def rope(**values: object) -> dict[str, object]:
    return {"rope_theta": 1e4, "max_position_embeddings": 64, **values}


PATCH = "patch source -o out --method yarn --factor 4 "
LONGROPE = "patch source -o out --method longrope --factor 4 "
FILE = "--factors-file factors.json"
FACTORS = [1.0 + index / 4 for index in range(16)]
EVAL = "eval-ppl source --data data.txt "
COMPARE = "compare source --data data.txt "
NEEDLE = "needle source --lengths 80,150 "
RULER = "ruler demo --mode rank --samples 2 --lengths "
TRAIN = "finetune source --output run "
RECIPE = TRAIN + "--recipe recipe.yaml"
RESUME = TRAIN + "--data data.txt --length 16 --steps 1 --resume"
CHAT = TRAIN + "--data chat.jsonl --length 16 --steps 1"
PLAN = "plan source --length 64 "
PUSH = "push patched --repo me/tiny --dry-run "
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_head": 2, "n_layer": 2, "n_positions": 64, "vocab_size": 512}
ROWS: list[tuple[str, str] | tuple[str, str, Prepare]] = [
    # checkpoints that cannot be used
    (PATCH, "expected an object", write(CONFIG, [1, 2])),
    (PATCH, "'gpt2' has no rotary position embedding to configure, so no scaling applies",
     write(CONFIG, GPT2)),
    *((command, "no layer sees further than 16 tokens (its window in config.json), so yarn has no effect on distant",
       edit(CONFIG, model_type="cohere2", sliding_window=16))
      for command in (PATCH, EVAL + "--method yarn --factor 2", COMPARE + "--methods yarn --factors 2")),
    *((command, "16 pairs rotate in stock transformers, but 8 in ropecli", edit(CONFIG, partial_rotary_factor=0.5))
      for command in (PATCH, PATCH + "--dry-run", EVAL + "--method yarn --factor 2", COMPARE + "--factors 2")),
    (PATCH, "no *.safetensors weights", remove(WEIGHTS)),
    (PATCH, "weight_map is None; expected the file of each tensor", write(INDEX, {})),
    (PATCH, "has the weights twice: transformers reads model.safetensors",
     write("source/model-1.safetensors", ""), write(INDEX, {"weight_map": {"b": "model-1.safetensors"}})),
    (PATCH, "lists model-2.safetensors", write(INDEX, {"weight_map": {"b": "model-2.safetensors"}})),
    (PATCH, "model.safetensors is damaged", write(WEIGHTS, "version https://git-lfs.github.com/spec/v1")),
    ("patch nowhere -o out --method yarn --factor 4", "No folder"),
    ("inspect model.gguf", "model.gguf is a GGUF file, for llama.cpp. Patch the", write("model.gguf", "GGUF")),
    ("inspect source", "no RoPE field that ropecli knows", write(CONFIG, {})),
    ("inspect source", "hidden_size", write(CONFIG, rope())),
    ("inspect source", "warprope", write(CONFIG, rope(head_dim=8, rope_scaling={"type": "warprope"}))),
    ("inspect ~nosuchuser/x", "No folder ~nosuchuser/x"),
    (EVAL, "tied weights have other shapes than config.json implies.",
     edit(CONFIG, tie_word_embeddings=True, vocab_size=600)),
    ("patch source --method rerope --factor 2 -o out", "text_config in config.json is 5", edit(CONFIG, text_config=5)),
    # checkpoints from strangers
    (PATCH, "source/config.json is a link out of its folder, to ", link(CONFIG)),
    ("revert patched -o out", "is a link out of its folder", patched(link("patched/ropecli.yaml"))),
    (TRAIN + "--data data.txt", "is a link out of its folder", link("source/tokenizer.json")),
    (PATCH, "source/config.json is a", make(CONFIG, "pipe")),
    (PATCH, "source/ropecli.yaml is a", make("source/ropecli.yaml", "socket")),
    (PATCH, "lists /etc/passwd, which is not in", write(INDEX, {"weight_map": {"b": "/etc/passwd"}})),
    (PATCH, "config.json cannot be read", write(CONFIG, '{"a":' * 10**5 + "1" + "}" * 10**5)),
    (EVAL, "requests attention code from the Hub",
     edit(CONFIG, text_config={"attn_implementation": "paged|owner/kernel@main:run"})),
    # damaged records
    ("inspect patched", "could not determine a constructor",
     patched(write("patched/ropecli.yaml", "a: !!python/object/apply:os.system ['touch canary']\n"))),
    ("inspect patched", "'scaling'", patched(write("patched/ropecli.yaml", "changes: []\n"))),
    # patch
    ("patch source -o out --method yran --factor 4", "Did you mean 'yarn'?"),
    ("patch source -o out --method yarn", "needs --factor or --target-length"),
    ("patch source -o out --method yarn --target-length 63", "63 is below the pretraining length, 64"),
    ("patch source -o out --method dynamic-yarn --factor 4", "eval-ppl --methods dynamic-yarn --factors 4"),
    ("patch source --method yarn --factor 4", "--output"),
    (PATCH + "--set betafast=8", "Did you mean 'beta_fast'?"),
    (PATCH + "--set beta_fast", "KEY=VALUE"),
    (PATCH + "--set beta_fast=8 --set beta_fast=16", "beta_fast was given twice"),
    (PATCH, "not empty", write("out/kept", "kept")),
    (PATCH + FILE, "--factors-file is for longrope and custom; yarn takes no list", write("factors.json", FACTORS)),
    (LONGROPE + FILE, "factors.json cannot be read", write("factors.json", "[1, 2")),
    # look, export, merge
    ("theory source --factor 4", "--factor has no effect without --methods"),
    ("theory source --methods ntk,yarn --factor 4 --set abf.p=1", "one of ntk, yarn"),
    ("export source --engine vlm", "ollama, sglang, trl, unsloth, vllm. Did you mean 'vllm'?"),
    ("export source --engine vllm -o new", "needs no config file"),
    ("export source --engine trl -o trl.yaml", "trl.yaml exists", write("trl.yaml", "dataset_name: mine")),
    ("merge source -o whole", "source has no adapter_config.json, so there is no adapter to merge"),
    # plan
    (PLAN + "--gpu-memory 1MB", "Nothing fits"),
    # measure
    (EVAL + "--stride 5", "--stride applies only to --protocol sliding, not to 'prefix'"),
    (EVAL + "--lengths 24,10000000", "No document has at least 10000000 tokens"),
    (EVAL + "--split train", "data.txt has no splits. Remove the split 'train'."),
    ("extend source --length 32 --data data.txt -o out", "is pretrained on 64 tokens: there is nothing to extend"),
    (EVAL + "--revision v1", "--revision is v1, but source is not a Hub id"),
    ("eval-ppl source --data rows.jsonl", "rows.jsonl, line 1: no column 'text'. Columns: body.",
     write("rows.jsonl", {"body": "a"})),
    (COMPARE + "--stride 24 --protocol sliding --lengths 24", "stride of 24 tokens"),
    (COMPARE + "--resume", "--output"),
    (NEEDLE + "--style passkey --data data.txt", "--data has no effect with --style passkey"),
    (RULER + "100 --tasks niah_single_1", "A prompt of 100 tokens is too short for niah_single_1."),
    (RULER + "512 --tasks niah", "--tasks has 'niah'; expected one of niah_single_1"),
    *(
        (command, "source, a BertTokenizer, cannot encode text: WordPiece error: Missing [UNK] token",
         edit("source/tokenizer_config.json", tokenizer_class="BertTokenizer"))
        for command in (EVAL, TRAIN + "--data data.txt", "needle source --lengths 512")
    ),
    # finetune
    (TRAIN + "--data demo", "demo-train"),
    (TRAIN + "--data demo-train --set lenght=3", "lenght"),
    (RECIPE, "key 'steps' is given twice", write("recipe.yaml", "steps: 1\n" * 2)),
    (RECIPE, " k1: Extra inputs are not permitted", write("recipe.yaml", "".join(f"k{i}: 1\n" for i in range(200)))),
    (RESUME, "run.yaml cannot be read: while scanning a simple key",
     damaged_run("source:\n  checkpoint: source\nrec")),
    (CHAT, "chat.jsonl:1: system is 5; expected", conversation("user", "a", system=5)),
    # theory, report
    ("report source/config.json --output page.html", "has no reports"),
    # push
    ("push source --repo me/tiny", "ropecli did not change this checkpoint. Upload it with: hf upload me/tiny source"),
    ("push patched --repo tiny", "--repo is 'tiny'; expected owner/name", patched()),
    (PUSH + "--base-model tiny", "--base-model is 'tiny'; expected owner/name", patched()),
    (PUSH + "--base-model me/tiny", "which is the base model. Choose another repository.", patched()),
    (PUSH, "is an adapter. Merge it with its base model: ropecli merge",
     patched(remove("patched/model.safetensors"), write("patched/adapter_config.json", "{}"))),
    (PUSH, "was edited after ropecli.yaml was written (max_position_embeddings)",
     patched(edit("patched/config.json", max_position_embeddings=512))),
    (PUSH, "README.md cannot become the model card: its metadata are a list",
     patched(write("patched/README.md", "---\n- a list\n---\n"))),
]  # fmt: skip


@pytest.fixture(autouse=True)
def deadline():
    """A pipe that is opened waits for ever; the alarm ends that."""

    def stop(*arguments: object) -> None:
        raise TimeoutError("still waiting")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("row", [pytest.param(row, id=f"{row[0][:60]}: {row[1][:40]}") for row in ROWS])
def test_bad_input_is_refused(row, ropecli, source, tmp_path, contents, monkeypatch):
    command, message, *prepare = row
    monkeypatch.chdir(tmp_path)
    write("data.txt", "ba de fi go ku " * 200)(tmp_path)
    secret = json.loads((source / "config.json").read_text()) | {"password": "hunter2"}
    write(PRIVATE, secret)(tmp_path)
    for change in prepare:
        change(tmp_path)
    before = contents(tmp_path)
    outcome = ropecli(*command.split())
    outcome.is_refused(" ".join(message.split()))
    assert len(outcome.err) < 1500
    assert "hunter2" not in outcome.err
    assert contents(tmp_path) == before


def test_a_folder_with_a_space_is_quoted_in_commands(ropecli, source, monkeypatch):
    monkeypatch.chdir(source.parent)
    source.rename("my folder")
    ropecli("push", "my folder", "--repo", "me/tiny").is_refused("hf upload me/tiny 'my folder'")
    Path("my folder", "adapter_config.json").write_text("{}")
    Path("my folder", "model.safetensors").unlink()
    ropecli("inspect", "my folder").is_refused("ropecli merge 'my folder' --output DIR")
