"""Bad input, one row each: what is prepared, the command, and the part of the one message that matters.

A row's `prepare` writes files below the current folder, which has the checkpoint `source` (a copy of the tiny Llama).
Every command ends with exit status 2, one message, and no traceback.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

import ropecli


class Refusal(NamedTuple):
    name: str
    command: Sequence[object]
    message: str
    prepare: Callable[[Path], object] = lambda folder: None


def write(name: str, text: str | bytes) -> Callable[[Path], object]:
    """A `prepare` that writes one file."""

    def prepare(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))

    return prepare


SQUAD = (
    '{"data": [{"paragraphs": [{"context": "A text.", "qas": [{"question": "Which?", "answers": [{"text": %s}]}]}]}]}'
)
HOTPOTQA = '[{"question": "Which?", "answer": %s, "context": [["A title", ["A text."]]]}]'
ASK_SQUAD = ["ruler", "source", "--lengths", "512", "--tasks", "qa_1", "--squad", "questions.json"]
ASK_HOTPOTQA = ["ruler", "source", "--lengths", "512", "--tasks", "qa_2", "--hotpotqa", "questions.json"]
ANSWER = "questions.json is not a file of squad questions, data.0.paragraphs.0.qas.0.answers.0.text: Input should be"
RULER: list[Refusal] = [
    *(
        Refusal(
            f"ruler: threshold {value}", ["ruler", "source", "--threshold", value], f"--threshold is {value}; expected"
        )
        for value in ("85.6", "0", "nan")
    ),
    Refusal(
        "ruler: questions without their task",
        ["ruler", "source", "--tasks", "vt", "--squad", "questions.json"],
        "--squad is for qa_1, which is not in --tasks",
    ),
    *(
        Refusal(f"ruler: answer {answer}", ASK_SQUAD, ANSWER, write("questions.json", SQUAD % answer))
        for answer in ("1945", "null", '["a"]')
    ),
    Refusal(
        "ruler: empty answer",
        ASK_SQUAD,
        "questions.json: the question 'Which?' has an empty answer",
        write("questions.json", SQUAD % '""'),
    ),
    Refusal(
        "ruler: lone surrogate",
        ASK_SQUAD,
        "questions.json is not a file of squad questions, file: Invalid JSON",
        write("questions.json", SQUAD % r'"\ud800"'),
    ),
    Refusal(
        "ruler: deep nesting",
        ASK_SQUAD,
        "questions.json is not a file of squad questions, file: Invalid JSON: recursion limit",
        write("questions.json", "[" * 100_000),
    ),
    Refusal(
        "ruler: context that is a number",
        ASK_SQUAD,
        "data.0.paragraphs.0.context: Input should be a valid string",
        write("questions.json", (SQUAD % '"a"').replace('"A text."', "5")),
    ),
    Refusal(
        "ruler: hotpotqa answer that is a number",
        ASK_HOTPOTQA,
        "questions.json is not a file of hotpotqa questions, 0.answer: Input should be a valid string",
        write("questions.json", HOTPOTQA % 5),
    ),
]


def patched(name: str, text: str | bytes) -> Callable[[Path], object]:
    """A `prepare` that patches `source` to `patched` and adds a file to it."""

    def prepare(folder: Path) -> None:
        ropecli.patch(folder / "source", method="yarn", factor=2, output=folder / "patched", no_verify=True)
        write(f"patched/{name}", text)(folder)

    return prepare


def added(name: str, text: str) -> Callable[[Path], object]:
    """A `prepare` that patches `source` to `patched` and appends to a file of it."""

    def prepare(folder: Path) -> None:
        patched("LICENSE", "none")(folder)
        with (folder / "patched" / name).open("a") as file:
            file.write(text)

    return prepare


def move_source(folder: Path) -> None:
    (folder / "source").rename(folder / "my folder")


def make_adapter(folder: Path) -> None:
    move_source(folder)
    (folder / "my folder" / "adapter_config.json").write_text("{}")
    (folder / "my folder" / "model.safetensors").unlink()


LEVELS = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))
MERGED = "".join(f"a{i}: &a{i}\n" + f"  <<: *a{i - 1}\n" for i in range(1, 9))
LONG = "v" * 5000
FINETUNE = ("finetune", "source", "--output", "out", "--recipe", "recipe.yaml")
PUSH = ("push", "patched", "--repo", "me/tiny", "--dry-run")
MEASURE = ("eval-ppl", "source", "--data", "demo", "--lengths", 32, "--max-documents", 1)

OUTPUTS: list[Refusal] = [
    Refusal(
        "merge keys in a recipe",
        FINETUNE,
        "merge keys (<<) are not supported",
        write("recipe.yaml", f"a0: &a0 {{x: 1}}\n{MERGED}"),
    ),
    Refusal(
        "a value in a recipe that does not fit its tag",
        FINETUNE,
        "does not fit its tag",
        write("recipe.yaml", "steps: !!bool foo\n"),
    ),
    Refusal(
        "aliases of lists in a recipe",
        FINETUNE,
        "it has too many values",
        write("recipe.yaml", f"a0: &a0 [x]\n{LEVELS}"),
    ),
    Refusal(
        "many keys in a recipe, one of them twice",
        FINETUNE,
        "key 'k19999' is given twice",
        write("recipe.yaml", "".join(f"k{i}: 1\n" for i in range(20_000)) + "k19999: 2\n"),
    ),
    Refusal(
        "many unknown keys in a recipe",
        FINETUNE,
        "  k1: Extra inputs are not permitted",
        write("recipe.yaml", "data: demo-train\n" + "".join(f"k{i}: 1\n" for i in range(200))),
    ),
    Refusal(
        "merge keys in the metadata of README.md",
        PUSH,
        "README.md cannot become the model card: merge keys (<<) are not supported",
        patched("README.md", "---\na: &a {x: 1}\nb: {<<: *a}\n---\n"),
    ),
    Refusal("a README.md of 3 MiB", PUSH, "it is larger than 2048 KiB", patched("README.md", "x" * 3 * 2**20)),
    Refusal("a README.md that is not UTF-8", PUSH, "'utf-8' codec can't decode", patched("README.md", b"# Caf\xe9")),
    Refusal(
        "changes of other layer types in ropecli.yaml",
        PUSH,
        "its changes are of other layer types",
        added("ropecli.yaml", "changes: [{path: rope_parameters.rope_type, before: {}, after: yarn}]\n"),
    ),
    Refusal(
        "a pattern without a file",
        (*PUSH, "--include", "absent.*"),
        "--include is 'absent.*', but patched has no such file",
        patched("LICENSE", "none"),
    ),
    Refusal(
        "a card that is the user's own text",
        PUSH,
        "patched.README.md exists and is not a model card of ropecli",
        lambda folder: (patched("LICENSE", "none")(folder), (folder / "patched.README.md").write_text("notes")),
    ),
    Refusal(
        "a card that is a link",
        PUSH,
        "patched.README.md exists and is not a model card of ropecli",
        lambda folder: (
            patched("LICENSE", "none")(folder),
            (folder / "patched.README.md").symlink_to(folder / "notes.md"),
        ),
    ),
    Refusal(
        "a folder's name in a command, for hf",
        ("push", "my folder", "--repo", "me/tiny"),
        "Upload it with: hf upload me/tiny 'my folder'",
        move_source,
    ),
    Refusal(
        "a folder's name in a command, for ropecli",
        ("inspect", "my folder"),
        "ropecli merge 'my folder' --output DIR",
        make_adapter,
    ),
    Refusal("a long name of a method", ("patch", "source", "--method", LONG, "--factor", 2), "Unknown method 'vvv"),
    Refusal(
        "a long name of a key",
        ("patch", "source", "--method", "yarn", "--factor", 2, "--dry-run", "--set", f"{LONG}=1"),
        "vvv...",
    ),
    Refusal("a long name of a config file", ("export", "source", "-e", "trl", "-o", LONG), "File name too long"),
    Refusal("a long name of an earlier report", ("plot", LONG), "File name too long"),
    Refusal("a long name of a recipe", ("finetune", "source", "-o", "out", "--recipe", LONG), "File name too long"),
    Refusal(
        "key tokens where nothing can be written",
        (*MEASURE, "--protocol", "longppl", "--evaluator", "source", "--keys", "text/keys.json"),
        "text is not a writable folder",
        write("text", "x"),
    ),
    Refusal(
        "a report inside of another output",
        ("compare", "source", "--data", "demo", "--methods", "none", "-o", "out", "--plot", "out/plot.png"),
        "out and out/plot.png cannot both be written",
    ),
]


def conversation(messages: list[object], **fields: object) -> Callable[[Path], object]:
    """A `prepare` that writes one conversation to data.jsonl, and a chat template."""

    def prepare(folder: Path) -> None:
        row = {"messages": messages, **fields}
        write("data.jsonl", json.dumps(row))(folder)
        template = "{% for message in messages %}{{ message.role + ': ' + message.content }}{% endfor %}"
        write("source/chat_template.jinja", template)(folder)

    return prepare


def damaged_run(name: str, text: str | bytes) -> Callable[[Path], object]:
    """A `prepare` that leaves the unfinished run `run`, with one of its files replaced."""

    def prepare(folder: Path) -> None:
        write("data.txt", "ba de fi go ku " * 200)(folder)
        settings = {"tracker": "none", "warmup_steps": 0}
        ropecli.finetune("source", data="data.txt", length=16, steps=1, output="run", settings=settings)
        (folder / "run" / "config.json").unlink()
        write(f"run/{name}", text)(folder)

    return prepare


RESUME = ["finetune", "source", "--data", "data.txt", "--length", 16, "--steps", 1, "--output", "run", "--resume"]

TRAINING: list[Refusal] = [
    Refusal(f"run.yaml that is {what}", RESUME, f"run.yaml: {message}", damaged_run("run.yaml", text))
    for what, text, message in [
        ("not UTF-8", b"recipe: {data: caf\xe9}", "'utf-8' codec can't decode"),
        ("half a file", "source:\n  checkpoint: source\nrec", "while scanning a simple key"),
        ("a list", "- recipe", "it has no source or recipe"),
        ("without a recipe", "recipe: [1, 2]", "it has no source or recipe"),
        ("huge", "recipe: {data: " + "x" * 2**20 + "}", "it is larger than 1024 KiB"),
    ]
]
TRAINING += [
    Refusal(
        f"metrics.jsonl with {what}",
        RESUME,
        "metrics.jsonl is damaged in line 1. Delete that line or the file",
        damaged_run("metrics.jsonl", text + b'\n{"step": 1, "loss": 2.5}\n'),
    )
    for what, text in [
        ("a line that is not UTF-8", b'{"step": 1, "loss": 2.5, "protocol": "\xe9"}'),
        ("a line that is half", b'{"step": 1, "lo'),
        ("a list", b"[1, 2.5]"),
        ("a loss that is text", b'{"step": 1, "loss": "low"}'),
        ("deep nesting", b"[" * 10**5),
    ]
]
TRAINING += [
    Refusal(
        f"conversations with {what}",
        ["finetune", "source", "--data", "data.jsonl", "--length", 16, "--steps", 1, "--output", "run"],
        f"data.jsonl:0: {message}",
        conversation(messages, **fields),
    )
    for what, messages, fields, message in [
        (
            "a system prompt that is a number",
            [{"role": "user", "content": "a"}],
            {"system": 5},
            "system is 5; expected",
        ),
        ("a role that is a list", [{"from": ["human"], "value": "a"}], {}, "message 0 has the role ['human']"),
        (
            "a part that is a number",
            [{"role": "user", "content": [{"type": "text", "text": 5}]}],
            {},
            "message 0 has the content [{'type': 'text', 'text': 5}]; expected text.",
        ),
        ("deep tools", [{"role": "user", "content": "a"}], {"tools": "[" * 10**5}, "tools is not JSON"),
    ]
]


def edited(name: str, **values: object) -> Callable[[Path], object]:
    """A `prepare` that changes keys of a JSON file in `source`, and writes data.txt."""

    def prepare(folder: Path) -> None:
        write("data.txt", "ba de fi go ku " * 200)(folder)
        path = folder / "source" / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return prepare


# loads the files of the other class, and then fails on most words
wordpiece = edited("tokenizer_config.json", tokenizer_class="BertTokenizer")


OTHERS: list[Refusal] = [
    Refusal(
        f"a tokenizer that fails, in {name}",
        [name, "source", *options],
        "source, a BertTokenizer, cannot encode text: WordPiece error: Missing [UNK] token from the vocabulary",
        wordpiece,
    )
    for name, *options in [
        ("eval-ppl", "--data", "data.txt"),
        ("finetune", "--data", "data.txt", "--output", "run"),
        ("compare", "--data", "data.txt", "--methods", "yarn"),
        ("tune", "--data", "data.txt", "--factor", 2, "--output", "run"),
        ("passkey", "--lengths", 512),
        ("needle", "--lengths", 512),
        ("ruler", "--lengths", 512),
    ]
]
OTHERS += [
    Refusal(
        "tied weights of other shapes",
        ["eval-ppl", "source", "--data", "data.txt"],
        "source: lm_head.weight has shape (512, 64); config.json implies (600, 64).",
        edited("config.json", tie_word_embeddings=True, vocab_size=600),
    ),
    Refusal(
        "a dtype that is a number",
        ["plan", "source", "--length", 128],
        "dtype in config.json is 5; expected a name, such as 'bfloat16'",
        edited("config.json", dtype=5),
    ),
    Refusal(
        "a sliding window that is text",
        ["plan", "source", "--length", 128],
        "sliding_window in config.json is '4k'; expected a number of tokens",
        edited("config.json", sliding_window="4k"),
    ),
    *(
        Refusal(
            f"a text_config that the model type does not have, in {command[0]}",
            command,
            "text_config is 5, which LlamaConfig does not have",
            edited("config.json", text_config=5),
        )
        for command in (
            ["plan", "source", "--length", 128],
            ["patch", "source", "--method", "rerope", "--factor", 2, "--output", "out"],
        )
    ),
]


def keys(intervals: list[list[int]]) -> Callable[[Path], object]:
    """A `prepare` that writes a file of key tokens as earlier releases did."""
    numbers = {"length": 64, "short_context": 16, "stride": 4, "min_gain": 2.0, "max_loss": 2.0}
    document = {"name": "data.txt", "sha256": "", "characters": 90, "intervals": intervals}
    return write("keys.json", json.dumps({"evaluator": "demo", "digest": "", **numbers, "documents": [document]}))


OTHERS += [
    Refusal(
        f"keys whose intervals {what}",
        ["eval-ppl", "source", "--data", "demo", "--protocol", "longppl", "--lengths", 64, "--keys", "keys.json"],
        "keys.json is damaged: the intervals of data.txt overlap or are reversed.",
        keys(intervals),
    )
    for what, intervals in [
        ("overlap", [[3, 9], [8, 12]]),
        ("are reversed", [[9, 3]]),
        ("are not in order", [[8, 12], [3, 7]]),
        ("end after the text", [[80, 91]]),
    ]
]
OTHERS += [
    Refusal(
        "an infinite short weight",
        ["tune", "demo", "--data", "demo-train", "--factor", 2, "--output", "out", "--short-weight", "inf"],
        "--short-weight is inf; expected a finite number of at least 0.",
    )
]
OTHERS += [
    Refusal(
        f"a split of a local file, in {name}",
        [name, "source", "--split", "train", "--data", *options],
        f"{options[0]} is not a Hub dataset, so it has no split 'train'. Remove the split.",
        write("data.txt", "ba de fi go ku " * 200),
    )
    for name, *options in [
        ("eval-ppl", "data.txt"),
        ("compare", "demo", "--methods", "yarn"),
        ("needle", "data.txt", "--lengths", 512),
        ("ruler", "data.txt", "--lengths", 512),
        ("tune", "demo-train", "--factor", 2, "--output", "run"),
        ("finetune", "data.txt", "--output", "run"),
    ]
]


EVAL = "eval-ppl source --data demo "
COMPARE = "compare source --data demo "
NEEDLE = "needle source --lengths 80,150 "
PLOT = "plot source --kind frequencies "
RULER_ROW = "ruler demo --mode rank --samples 2 --lengths "
OTHERS += [
    Refusal(command, command.split(), message)
    for command, message in [
        (EVAL + "--protocol middle", "prefix, tail"),
        (EVAL + "--stride 5", "stride applies only to the protocol sliding, not to prefix"),
        (EVAL + "--min-tokens 5", "--min-tokens and --max-tokens apply to whole documents"),
        (EVAL + "--min-tokens 10000000 --protocol yarn", "at least 10000000 tokens"),
        (EVAL + "--attn flash", "--attn is 'flash'; expected one of auto, sdpa, eager"),
        (EVAL + "--lengths a,b", "--lengths is 'a,b'; expected numbers"),
        (EVAL + "--lengths 24,10000000", "No document has at least 10000000 tokens"),
        (EVAL + "--factor 4", "need a method"),
        (EVAL + "--method yarn", "yarn needs --factor, such as --factor 4"),
        (EVAL + "--method longrope --factor 4", "requires long_factor"),
        (COMPARE + "--methods ,", "list of methods is empty"),
        (COMPARE + "--set beta_fast=8", "METHOD.KEY=VALUE"),
        (COMPARE + "--methods longrope", "long_factor"),
        (COMPARE + "--stride 24 --protocol sliding --lengths 24", "stride of 24 tokens"),
        (COMPARE + "--resume", "--output"),
        (COMPARE + "--plot plot.docx", "docx"),
        (COMPARE + "source --revision main", "--revision"),
        (COMPARE + "--measure ppl,rule", "Unknown measure 'rule'"),
        (COMPARE + "--measure ppl,ruler --plot x.png", "--plot draws one measure"),
        (NEEDLE + "--mode ranks", "Did you mean 'rank'"),
        (NEEDLE + "--needle x --question y", "expected {key} in it"),
        (NEEDLE + "--needle {key} --question y --keys 2", "{name}"),
        (NEEDLE + "--needle {name}{key} --question {name} --keys 10", "at least 11"),
        (NEEDLE + "--needle {key} --question y --style code", "--style code cannot be used"),
        (NEEDLE + "--mode generate --candidates 10", "--candidates has no effect"),
        ("passkey source --lengths 20", "at least"),
        (RULER_ROW + "100 --tasks niah_single_1", "A prompt of 100 tokens is too short for niah_single_1."),
        (RULER_ROW + "512 --tasks niah", "Unknown task 'niah'."),
        (RULER_ROW + "512 --tasks qa_1", "--squad FILE"),
        (RULER_ROW + "512 --chat-template llama", "expected auto or none"),
        ("theory nowhere", "nowhere"),
        ("theory source --methods jarn --factor 4", "Did you mean 'yarn'?"),
        ("theory source --factor 4", "need a method"),
        ("theory source --methods as-is --set p=1", "as-is has no parameters"),
        ("theory source --methods ntk,yarn --factor 4 --set abf.p=1", "one of ntk, yarn"),
        ("plot missing.json", "Cannot read missing.json"),
        ("plot missing.json --kind perplxity", "Did you mean 'perplexity'"),
        ("plot missing.json --metric nll", "Unknown metric 'nll'"),
        ("plot missing.json --methods yarn", "--methods works only for plots of a checkpoint"),
        ("plot source", "is not a report"),
        ("plot demo", "Plot a checkpoint with --kind"),
        (PLOT + "--set beta_fast=8", "--set needs --methods"),
        (PLOT + "--metric ppl", "--metric works only for plots of reports"),
        ("plot source source --kind frequencies", "draws one checkpoint; 2 were given"),
        ("report missing.json --output page.pdf", "does not end in .html"),
        ("report source/config.json --output page.html", "is not a report"),
        ("report missing.json --output source/config.json/page.html", "could not be written"),
        ("recipe yarn-12k", "Unknown recipe 'yarn-12k'. Did you mean 'yarn-128k'?"),
        ("recipe demo --schema", "Use --schema without NAME"),
        ("methods yran", "Did you mean 'yarn'?"),
        ("export source --engine vlm", "ollama, sglang, trl, vllm. Did you mean 'vllm'?"),
        ("inspect ~nosuchuser/x", "'~nosuchuser/x' is not a valid folder name"),
        ("finetune source --output out", "data"),
        ("finetune source --output out --data demo", "demo-train"),
        ("finetune source --output out --recipe demo.yaml", "demo.yaml cannot be read"),
        ("finetune source --output out --recipe yarn-12k", "Did you mean 'yarn-128k'? `ropecli recipe` lists all."),
        ("finetune source --output out --data demo-train --set lenght=3", "lenght"),
        ("finetune source --output out --data demo-train --set steps", "KEY=VALUE"),
        ("finetune nowhere --output out --data demo-train", "nowhere"),
        ("merge adapter -o out --base source --revision main", "adapter"),
        ("merge adapter -o source", "exists and is not empty"),
        ("inspect source --trust-remote-code", "does not run code from a checkpoint"),
    ]
]


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.name) for row in (*RULER, *OUTPUTS, *TRAINING, *OTHERS)] or [None]
)
def test_bad_input_is_refused(row, ropecli, source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row.prepare(tmp_path)
    outcome = ropecli(*row.command)
    assert outcome.code == 2, outcome
    assert f"\n{outcome.err}".count("\nerror:") == 1, outcome.err
    assert "Traceback" not in outcome.err
    assert row.message in " ".join(outcome.err.split()) or row.message in outcome.err
    assert len(outcome.err) < 1500
