"""The llama.cpp line, against llama.cpp: a Llama as a GGUF, run with the flags that `ropecli export` prints, gives
the next-token log-probabilities of stock transformers, inside and beyond the pretraining length.

The engine is llama-cpp-python, built from its source distribution into an environment that pytest's cache keeps.
"""

import json
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest

import ropecli
from ropecli.data.documents import read_documents
from ropecli.data.sources import read_texts
from ropecli.engines.engine_export import export_checkpoint

pytestmark = pytest.mark.slow

PINNED = ["llama-cpp-python==0.3.36", "gguf==0.19.0", "numpy"]
BUILD = "-DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"
RUNNER = Path(__file__).with_name("run_llama_cpp.py")
WINDOW, TARGET = 256, 1024
POSITIONS = [200, 400, 700, 1000]
AGREES = 5e-4
"""Largest difference in log-probability over the 2048 words. Two float32 programs differ by up to 1.2e-4 here."""
DIFFERS = 0.2
YARN_IN_FILE = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
FROM_FLAGS = ["yarn", "linear", "ntk", "ntk-by-parts", "dynamic"]


@pytest.fixture(scope="module")
def engine(environment):
    """engine(verb, **job): runs run_llama_cpp.py where llama.cpp is. Skips where it cannot be built, and says why."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CMAKE_ARGS", BUILD)
        python = environment("llama-cpp-python", PINNED, "--no-binary", "llama-cpp-python")

    def run(verb: str, folder: Path, **job: object) -> None:
        (folder / "job.json").write_text(json.dumps(job))
        result = subprocess.run([python, RUNNER, verb, folder / "job.json"], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr

    return run


@pytest.fixture(scope="module")
def tokens():
    checkpoint = ropecli.open_checkpoint("demo")
    tokenizer = ropecli.load_tokenizer(checkpoint)
    documents = read_documents(read_texts("demo"), tokenizer, TARGET, most=1, cut=TARGET)
    return documents.kept[0].ids[:TARGET].tolist()


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """The demo checkpoint's weights in float32."""
    from safetensors.torch import load_file

    path = tmp_path_factory.mktemp("weights") / "weights.npz"
    folder = ropecli.open_checkpoint("demo").folder
    np.savez(path, **{name: tensor.float().numpy() for name, tensor in load_file(folder / "model.safetensors").items()})
    return path


@pytest.fixture
def by_llama_cpp(engine, weights, tokens, tmp_path):
    """by_llama_cpp(command, metadata, tensors) -> log-probabilities at POSITIONS.

    The file holds the weights, the unpatched base, and what is given: all other scaling comes from the command.
    """

    def run(command: str, metadata: dict | None = None, tensors: dict | None = None) -> np.ndarray:
        model, output = str(tmp_path / "model.gguf"), str(tmp_path / "logits.npy")
        config = ropecli.open_checkpoint("demo").config
        stored = {"llama.rope.freq_base": config["rope_theta"], **(metadata or {})}
        made = {"config": config, "weights": str(weights), "metadata": stored, "tensors": tensors or {}}
        engine("convert", tmp_path, model=model, **made)
        read = {"arguments": arguments_of(command), "tokens": tokens, "positions": POSITIONS}
        engine("logits", tmp_path, model=model, output=output, **read)
        return log_probabilities(np.load(output))

    return run


def arguments_of(command: str) -> dict:
    """The arguments of llama_cpp.Llama that do what the command line's flags do."""
    words = shlex.split(command)
    flags = dict(zip(words[1::2], words[2::2], strict=True))
    assert words[0] == "llama-server"
    arguments = {"n_ctx": int(flags.pop("-c")), "yarn_attn_factor": -1.0, "yarn_ext_factor": -1.0}
    for unused in ("-m", "-np"):
        flags.pop(unused)
    for flag, value in flags.items():
        if flag == "--rope-scaling":
            arguments["rope_scaling_type"] = {"none": 0, "linear": 1, "yarn": 2}[value]
        elif flag == "--rope-scale":
            arguments["rope_freq_scale"] = 1 / float(value)
        elif flag == "--override-kv":
            key, _, typed = value.partition("=")
            kind, _, number = typed.partition(":")
            arguments["kv_overrides"] = {key: {"int": int, "float": float}[kind](number)}
        elif flag == "--yarn-orig-ctx":
            arguments["yarn_orig_ctx"] = int(value)
        else:
            arguments[flag.removeprefix("--").replace("-", "_")] = float(value)
    return arguments


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    import torch

    return torch.tensor(logits).double().log_softmax(-1).numpy()


def largest(difference: np.ndarray) -> np.ndarray:
    """At each position, over the words of the vocabulary."""
    return np.abs(difference).max(axis=-1)


@pytest.mark.parametrize("method", FROM_FLAGS)
def test_the_flags_give_what_transformers_gives(method, patched, by_llama_cpp, transformers_logits, tokens):
    checkpoint = patched(method).checkpoint
    expected = log_probabilities(transformers_logits(checkpoint.folder, tokens)[POSITIONS])
    agreed = largest(by_llama_cpp(export_checkpoint(checkpoint, "llama.cpp").command) - expected)
    without = largest(by_llama_cpp(f"llama-server -m model.gguf -np 1 -c {TARGET}") - expected)
    assert (agreed < AGREES).all()
    assert (without > DIFFERS).all()


def test_llama3_is_stored_in_the_file(patched, by_llama_cpp, transformers_logits, tokens):
    checkpoint = patched("llama3").checkpoint
    rope = ropecli.make_plan(checkpoint, ropecli.make_spec("llama3", TARGET / WINDOW)).ropes[None]
    factors = {"rope_freqs.weight": (rope.geometry.inv_freq() / rope.inv_freq).tolist()}
    expected, command = (
        log_probabilities(transformers_logits(checkpoint.folder, tokens)[POSITIONS]),
        export_checkpoint(checkpoint, "llama.cpp").command,
    )
    agreed = largest(by_llama_cpp(command, tensors=factors) - expected)
    without = largest(by_llama_cpp(command) - expected)
    assert (agreed < AGREES).all()
    assert (without > DIFFERS).all()


@pytest.mark.parametrize(
    ("method", "stored"),
    [
        ("linear", {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}),
        ("yarn", {**YARN_IN_FILE, "llama.rope.scaling.original_context_length": WINDOW}),
    ],
)
def test_ollama_needs_no_flags_for_what_the_file_stores(
    method, stored, patched, by_llama_cpp, transformers_logits, tokens
):
    """Ollama runs llama.cpp with -c and without --rope options."""
    checkpoint = patched(method).checkpoint
    num_ctx = export_checkpoint(checkpoint, "ollama").overrides["PARAMETER num_ctx"]
    command = f"llama-server -m model.gguf -c {num_ctx} -np 1"
    agreed = largest(
        by_llama_cpp(command, stored) - log_probabilities(transformers_logits(checkpoint.folder, tokens)[POSITIONS])
    )
    assert (agreed < AGREES).all()
