"""Reading JSON lines strictly, against `datasets` in streaming mode. Linux only."""

import gzip
import json
import resource
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import Rows, in_new_process

WAYS = ("datasets", "ropecli")


def read(file: str, way: str) -> dict[str, Any]:
    """Read all texts of a file. seconds: CPU time. MiB: peak memory of the process."""
    from datasets import load_dataset

    from ropecli.data.sources import Source

    def texts() -> Iterator[str]:
        if way == "ropecli":
            return (text for _, text in Source(file).texts())
        return (row["text"] for row in load_dataset("json", data_files=file, split="train", streaming=True))

    begun = time.process_time()
    characters = sum(map(len, texts()))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": time.process_time() - begun, "MiB": peak, "characters": characters}


def run(megabytes: int = 1000, rounds: int = 2) -> Rows:
    """Read rows of source code with a few other columns, plain and as .gz. The best of the rounds counts."""
    library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    rows = [
        json.dumps({"id": number, "meta": {"share": number / 3, "tags": ["x", "y"]}, "text": path.read_text("utf-8")})
        for number, path in enumerate(library)
    ]
    content = "\n".join([*rows, ""]).encode()
    with tempfile.TemporaryDirectory() as folder:
        for name, opened in (("rows.jsonl", open), ("rows.jsonl.gz", gzip.open)):
            path = Path(folder) / name
            with opened(path, "wb") as file:  # type: ignore[operator]
                for _ in range(max(1, megabytes * 10**6 // len(content))):
                    file.write(content)
            found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
            for _ in range(rounds):
                for way in WAYS:
                    found[way].append(in_new_process(read, str(path), way))
            assert len({result["characters"] for results in found.values() for result in results}) == 1
            for way, results in found.items():
                best = {key: min(result[key] for result in results) for key in ("seconds", "MiB")}
                yield f"reading {megabytes} MB of rows, {name}", {"": way, **best}
            path.unlink()
