"""Tiny models, built on disk once per session and really loaded; the command line, called as a user calls it."""

import copy
import importlib.metadata
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import pytest
from packaging.version import Version
from tiny_settings import MULTIMODAL, TINY

hypothesis.settings.register_profile("untimed", deadline=None)  # the machine may be busy
hypothesis.settings.load_profile("untimed")
WINDOW, VOCABULARY = TINY["max_position_embeddings"], TINY["vocab_size"]


TRANSFORMERS = Version(importlib.metadata.version("transformers"))


def pytest_configure(config) -> None:
    config.addinivalue_line("markers", "transformers(release, why): skipped with older releases of transformers")


def pytest_runtest_setup(item) -> None:
    for mark in item.iter_markers("transformers"):
        release, why = mark.args
        if Version(release) > TRANSFORMERS:
            pytest.skip(f"transformers {TRANSFORMERS} is older than {release}: {why}")


class Outcome(NamedTuple):
    """What a command line gave. printed, said: standard output and error without line breaks."""

    code: int
    out: str
    err: str

    @property
    def printed(self) -> str:
        return " ".join(self.out.split())

    @property
    def said(self) -> str:
        return " ".join(self.err.split())

    def succeeds(self) -> "Outcome":
        assert self.code == 0, self.err
        return self

    def json(self) -> Any:
        """The JSON document that is all of standard output."""
        return json.loads(self.succeeds().out)

    def reports(self) -> list[dict[str, Any]]:
        return self.json()["reports"]

    def report(self) -> dict[str, Any]:
        """The only one."""
        [report] = self.reports()
        return report

    def is_refused(self, *parts: object) -> None:
        """Exit status 2, nothing on standard output, and one message that has these parts."""
        assert (self.code, self.out) == (2, ""), self
        assert sum(f"\n{self.err}".count(f"\n{begin}") for begin in ("error:", '{"error":')) == 1, self.err  # or --json
        assert "Traceback" not in self.err
        for part in parts:
            assert str(part) in self.said, self.err


@pytest.fixture(scope="session", autouse=True)
def token_cache(tmp_path_factory) -> Iterator[Path]:
    """The folder of tokenised sources, for this session and the processes that it starts: never the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("ROPECLI_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def ctrl_c() -> None:
    """A shell has what it starts in its background pass over Ctrl-C; these tests press it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def environment(request):
    """environment("trl", ["trl==..."], "--no-deps") -> the interpreter of an environment with these alone.

    It is kept for the next session, by its name. Skips where they cannot be installed, and says why.
    """
    import subprocess
    import sys
    import venv

    from filelock import FileLock

    def make(name: str, requirements: list[str], *options: object) -> Path:
        home = Path(request.config.cache.mkdir(name))
        python = home / "venv" / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
        ready = home / "ready"
        with FileLock(home / "lock"):  # of the other process of scripts/test
            if not ready.is_file() or ready.read_text() != "\n".join(requirements):
                venv.create(home / "venv", with_pip=True, clear=True)
                install = [python, "-m", "pip", "install", "--quiet", *options, *requirements]
                result = subprocess.run(install, capture_output=True, text=True)
                if result.returncode:
                    pytest.skip(f"{requirements[0]} cannot be installed here: {result.stderr.strip()[-800:]}")
                ready.write_text("\n".join(requirements))
        return python

    return make


@pytest.fixture
def ropecli(capsys, monkeypatch):
    """Calls the command line in this process: ropecli("inspect", folder) -> Outcome(code, out, err)."""

    def call(*arguments: object) -> Outcome:
        from ropecli.cli.app import main

        monkeypatch.setattr("sys.argv", ["ropecli", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        return Outcome(code, *capsys.readouterr())

    return call


@pytest.fixture(scope="session")
def fork(request, tmp_path_factory):
    """fork(function, argument, ..., processes=1, terminal=None, VARIABLE="value") -> the process, a forked.Forked."""
    import forked

    def start(function, *arguments, **options):
        process = forked.Forked(tmp_path_factory.mktemp("process"), function, *arguments, **options)
        request.addfinalizer(process.kill)  # of a test that failed
        return process

    forked.begin()  # with the variables of the session, not those of a test
    return start


@pytest.fixture(scope="session")
def start_ropecli(fork):
    """start_ropecli(["inspect", folder], processes=2, ...) -> `python -m ropecli`, forked as above."""
    import forked

    return lambda arguments, **options: fork(forked.ropecli, arguments, **options)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A folder of twelve text files, each some thousand characters long, of words in a seeded random order."""
    import numpy as np

    folder = tmp_path_factory.mktemp("corpus")
    words = [f"{a}{b}{c}" for a in "bdfgk" for b in "aeiou" for c in "lmnrst"]
    for index in range(12):
        picks = np.random.default_rng(index).integers(0, len(words), 900)
        (folder / f"text{index:02}.txt").write_text(" ".join(words[pick] for pick in picks), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tokenizer(corpus):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((path.read_text() for path in sorted(corpus.iterdir())), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="<s>", model_max_length=WINDOW)


@pytest.fixture(scope="session")
def chat_template() -> str:
    """For the tiny tokenizer."""
    return (
        "{% for message in messages %}{{ message.role + '\\n' + message.content + eos_token + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant\\n' }}{% endif %}"
    )


@pytest.fixture(scope="session")
def chat(tmp_path_factory, corpus) -> Path:
    """Twelve conversations of two to twelve messages, of the words of the corpus."""
    path = tmp_path_factory.mktemp("chat") / "chat.jsonl"
    rows = []
    for number, file in enumerate(sorted(corpus.iterdir())):
        words, messages = file.read_text(encoding="utf-8").split(), []
        for turn in range(number // 2 + 1):
            question, answer = words[turn * 40 : turn * 40 + 15], words[turn * 40 + 30 : turn * 40 + 35 + turn]
            messages += [{"role": "user", "content": " ".join(question)}]
            messages += [{"role": "assistant", "content": " ".join(answer)}]
        rows.append(json.dumps({"messages": messages}) + "\n")
    path.write_text("".join(rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def build(tmp_path_factory, tokenizer):
    """build("qwen2", head_dim=32, ...) -> folder of a two-layer checkpoint with random weights and a tokenizer.

    Multimodal types are built from their settings in tiny_settings.py.
    """
    import torch
    from transformers import CONFIG_MAPPING

    from ropecli.live.stock_transformers import auto_class_of

    def make(model_type: str, **settings: object) -> Path:
        if model_type not in CONFIG_MAPPING:
            pytest.skip(f"this release of transformers does not know {model_type}")
        folder = tmp_path_factory.mktemp(model_type)
        torch.manual_seed(0)
        config = CONFIG_MAPPING[model_type](**copy.deepcopy({**MULTIMODAL.get(model_type, TINY), **settings}))
        model = auto_class_of(config).from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)  # the default initialisation attends almost evenly, whatever the positions
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def llama(build) -> Path:
    """A Llama with head_dim 32, base 10000, pretraining length 64."""
    return build("llama", head_dim=32)


@pytest.fixture(scope="session")
def large(build) -> Path:
    """A Llama whose weights, in one file of 6 MiB, are more than the first and the last MiB."""
    return build("llama", head_dim=32, intermediate_size=4096)


@pytest.fixture
def changed_amid(tmp_path):
    """changed_amid(folder) -> a copy whose weights differ in one bit, in the middle of the file."""
    import shutil

    def change(folder: Path) -> Path:
        target = Path(shutil.copytree(folder, tmp_path / "changed-amid"))
        content = bytearray((target / "model.safetensors").read_bytes())
        content[len(content) // 2 // 4 * 4] ^= 1  # of a float32, so that it stays finite
        (target / "model.safetensors").write_bytes(content)
        return target

    return change


@pytest.fixture
def edited(tmp_path):
    """edited(folder, key=value, ...) -> a copy of the checkpoint with config.json changed; a value of ... removes."""
    import shutil

    def edit(folder: Path, name: str = "edited", **values: object) -> Path:
        target = tmp_path / name
        shutil.copytree(folder, target)
        config = json.loads((target / "config.json").read_text())
        for key, value in values.items():
            config.pop(key, None)
            if value is not ...:
                config[key] = value
        (target / "config.json").write_text(json.dumps(config))
        return target

    return edit


@pytest.fixture(scope="module")
def quiet():
    """Default configurations make transformers talk of token ids beyond their vocabulary."""
    from ropecli.live.stock_transformers import quiet_transformers

    with quiet_transformers():
        yield


@pytest.fixture
def patched(tmp_path):
    """patched(folder, "yarn", 4.0, beta_fast=64.0) -> the folder written, proved against the live model."""
    from ropecli.attention.patching import patch_to
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.checkpoint.patch_plan import make_plan
    from ropecli.scaling.spec import make_spec

    def patch(folder: Path, method: str, factor: float = 4.0, *, original_length: int | None = None, **params) -> Path:
        output = tmp_path / f"patched-{len(list(tmp_path.glob('patched-*')))}"
        spec = make_spec(method, factor, params)
        patch_to(make_plan(open_checkpoint(folder), spec, original_length=original_length), output)
        return output

    return patch


@pytest.fixture
def written(tmp_path):
    """written({"model_type": "llama", ...}) -> a folder with that config.json, and weights that nobody reads."""
    import numpy as np
    from safetensors.numpy import save_file
    from transformers import CONFIG_MAPPING

    from ropecli.config.families import family_of

    def write(config: dict) -> Path:
        if family_of(config).known and config["model_type"] not in CONFIG_MAPPING:
            pytest.skip(f"this release of transformers does not know {config['model_type']}")
        folder = tmp_path / f"written-{len(list(tmp_path.glob('written-*')))}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        save_file({"unused": np.zeros(1, dtype=np.float32)}, folder / "model.safetensors")
        return folder

    return write


@pytest.fixture(scope="session")
def evaluate():
    """evaluate(model, documents, lengths, "tail", batch_size=3, ...) -> perplexities, as cells. Options: LiveReader."""
    from ropecli.evaluation.driver import score_samples
    from ropecli.evaluation.readers.live import LiveReader
    from ropecli.evaluation.tasks.perplexity import Perplexity

    def measure(model, documents, lengths, protocol="prefix", **options):
        task = Perplexity(documents, lengths, protocol)
        return task.cells(score_samples(task, LiveReader(model, **options)))

    return measure


@pytest.fixture(scope="session")
def options_of():
    """options_of(PerplexityOptions, data=...) -> a group of options, with the defaults of the others."""
    from ropecli.signature import Default

    def make(group, **given):
        notes = {key: getattr(annotation, "__metadata__", ()) for key, annotation in group.__annotations__.items()}
        defaults = {key: note.value for key, each in notes.items() for note in each if isinstance(note, Default)}
        return {**dict.fromkeys(notes), **defaults, **given}

    return make


@pytest.fixture
def config_of():
    return lambda folder: json.loads((folder / "config.json").read_text())


@pytest.fixture
def live():
    """live(folder) -> by layer type, the rotary table of the model that stock transformers builds from config.json."""
    from ropecli.live.rotary import rotary_tables
    from ropecli.live.skeleton import build_without_weights
    from ropecli.live.stock_transformers import read_stock_config

    def tables(folder: Path) -> dict:
        model = build_without_weights(read_stock_config(folder))
        return {table.layer_type: table for table in rotary_tables(model)}

    return tables


@pytest.fixture
def assert_inspection_is_live(live):
    """Reads no weights: the frequencies that config.json gives us are those it gives transformers."""
    import numpy as np

    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.checkpoint.state import read_state

    def check(folder: Path) -> None:
        ropes = read_state(open_checkpoint(folder)).positions.ropes
        tables = live(folder)
        assert set(ropes) == set(tables)
        for layer_type, table in tables.items():
            np.testing.assert_allclose(ropes[layer_type].inv_freq, table.inv_freq, rtol=2e-6)
            assert ropes[layer_type].attention_factor == pytest.approx(table.attention_factor, rel=1e-9)

    return check
