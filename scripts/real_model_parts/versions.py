"""Makes documents whose end needs far text: an old version of a Python file, other files, and the new version.

Each package of versions.txt gives one file. Candidates are the Python files that have 1,536 to 4,096 tokens in both
releases and whose lines are similar by 0.5 to 0.98 (difflib). The one whose path has the smallest sha256 is taken. The
filler is the other Python files of the new release, by path, each text once.
"""

import difflib
import hashlib
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from real_model_parts.make import archive_files, download, sources

_TOKENS = range(1536, 4096 + 1)
_SIMILARITY = (0.5, 0.98)
LENGTHS = {"12k": 12_288, "16k": 16_384, "32k": 32_768}
_NEAR = 8192
"""The ceiling: the old version within the pretraining length."""


class Pair(NamedTuple):
    """The versions of one file, and the joined other files, as token ids."""

    path: str
    old: list[int]
    new: list[int]
    filler: list[int]


def make_versions(folder: Path) -> None:
    """Make the texts in folder/versions, unless they are there."""
    if (folder / "versions").exists():
        return
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "SmolLM2-135M")
    releases: dict[str, dict[str, dict[str, str]]] = defaultdict(dict)
    for source in sources("versions.txt"):
        print(f"{source.split}: {source.file}", flush=True)
        files = archive_files(source.file, download(source, folder / "downloads"))
        texts = {path: content.decode("utf-8").strip() for path, content in files if path.endswith(".py")}
        releases[source.file.split("-")[0]][source.split] = {path: f"{text}\n" for path, text in texts.items() if text}
    pairs = {package: choose(tokenizer, **splits) for package, splits in releases.items()}
    part = folder / "versions.part"
    shutil.rmtree(part, ignore_errors=True)
    neighbours = [*list(pairs.values())[1:], *pairs.values()]
    for number, (package, pair) in enumerate(pairs.items()):
        print(f"{package}: {pair.path}", flush=True)
        for name, ids in documents(tokenizer, pair, neighbours[number].filler):
            (part / name).mkdir(parents=True, exist_ok=True)
            (part / name / f"{number + 1}-{package}.py").write_text(_text(tokenizer, ids), encoding="utf-8", newline="")
    part.rename(folder / "versions")


def choose(tokenizer: Any, old: Mapping[str, str], new: Mapping[str, str]) -> Pair:
    """The file of the package by the rule above. old, new: texts by path. Raises ValueError if none fits."""
    for path in sorted(old.keys() & new.keys(), key=lambda path: hashlib.sha256(path.encode()).digest()):
        if old[path] == new[path]:
            continue
        versions = _ids(tokenizer, old[path]), _ids(tokenizer, new[path])
        lines = difflib.SequenceMatcher(None, old[path].splitlines(), new[path].splitlines(), autojunk=False)
        if all(len(ids) in _TOKENS for ids in versions) and _SIMILARITY[0] <= lines.ratio() <= _SIMILARITY[1]:
            seen = {old[path], new[path]}
            filler = dict.fromkeys(text for _, text in sorted(new.items()) if text not in seen)
            return Pair(path, *versions, _ids(tokenizer, "".join(filler)))
    raise ValueError("No file of the package fits.")


def documents(tokenizer: Any, pair: Pair, unrelated: Sequence[int]) -> Iterator[tuple[str, list[int]]]:
    """Folder and ids of each document of a pair. The control has unrelated text in the old version's place."""
    size = len(pair.old)
    for name, length in {"ceiling": _NEAR, **LENGTHS}.items():
        ids = fit(tokenizer, pair.old, pair.filler, length - size - len(pair.new), pair.new)
        yield name, ids
        if name in LENGTHS:
            yield f"{name}-control", fit(tokenizer, [], unrelated, size, ids[size:])


def fit(tokenizer: Any, before: Sequence[int], source: Sequence[int], size: int, after: Sequence[int]) -> list[int]:
    """`before`, `size` tokens of the source, and `after`: the first piece with which the text has these tokens again.

    Raises ValueError if there is none.
    """
    for start in range(len(source) - size + 1):
        ids = [*before, *source[start : start + size], *after]
        if _ids(tokenizer, _text(tokenizer, ids)) == ids:
            return ids
    raise ValueError(f"No {size} tokens fit.")


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, verbose=False)["input_ids"]


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)
