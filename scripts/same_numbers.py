"""Records the numbers printed by the command line, and compares them with a record of another commit.

Run by scripts/same-numbers. Covers the config.json changes (or refusal) of every method on every causal-LM type,
perplexity with every protocol and method, theory, retrieval, and the bytes of fine-tuned and tuned weights on one CPU
thread. Uses only the command line, so the code behind it can be refactored. Times, memory, paths and sentences are not
compared.
"""

import contextlib
import hashlib
import io
import json
import math
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from coverage import all_types, config_of

FREQUENCY = ("none", "linear", "abf", "ntk", "dynamic", "dynamic-yarn", "ntk-by-parts", "yarn", "llama3", "longrope")
FREQUENCY += ("p-rope", "nope", "custom")
DISTANCE = ("rerope", "leaky-rerope", "self-extend", "dual-chunk", "lm-infinite", "streaming")
SETTINGS = {"abf": ["--set", "beta=50"]}
DEMO = ("--data", "demo", "--max-documents", "3")
TRAINING = ("--set", "tracker=none", "--set", "mixed_precision=none", "--steps", "2")
UNCOMPARED = {
    "checkpoint", "command", "description", "digest", "environment", "fix", "message", "messages", "output",
    "peak_memory", "seconds", "sentences", "summary", "tokens_per_second", "training", "version", "warnings",
}  # fmt: skip
EVALUATIONS = {
    "prefix": ["eval-ppl", "demo", *DEMO, "--lengths", "64,256,512"],
    "prefix in chunks": ["eval-ppl", "demo", *DEMO, "--lengths", "512", "--chunk", "100"],
    "tail": ["eval-ppl", "demo", *DEMO, "--lengths", "128,512", "--protocol", "tail"],
    "sliding": ["eval-ppl", "demo", *DEMO, "--lengths", "256", "--protocol", "sliding", "--max-tokens", "1000"],
    "disjoint": ["eval-ppl", "demo", *DEMO, "--lengths", "256", "--protocol", "disjoint", "--max-tokens", "1000"],
    "yarn": ["eval-ppl", "demo", *DEMO, "--lengths", "256", "--protocol", "yarn", "--max-tokens", "1000"],
    "in memory": ["eval-ppl", "demo", *DEMO, "--lengths", "512", "--method", "yarn", "--factor", "2"],
    "baseline": [
        "eval-ppl", "demo", *DEMO, "--lengths", "128,512", "--protocol", "tail", "--method", "ntk", "--factor", "4",
        "--baseline", "demo",
    ],
    "compare": [
        "compare", "demo", *DEMO, "--lengths", "256,512", "--factors", "2,4", "--methods",
        "as-is,none,linear,abf,ntk,dynamic,dynamic-yarn,ntk-by-parts,yarn,llama3,p-rope,nope", "--set", "abf.beta=50",
    ],
    "compare distances": ["compare", "demo", *DEMO, "--lengths", "256,512", "--methods", ",".join(DISTANCE)],
    "passkey": ["passkey", "demo", "--lengths", "128,256", "--trials", "2"],
    "needle": ["needle", "demo", "--lengths", "128,256", "--trials", "2", "--keys", "2", "--depths", "0.2,0.8"],
    "needle generate": ["needle", "demo", "--lengths", "256", "--trials", "1", "--mode", "generate"],
}  # fmt: skip
THEORY = {
    "as it is": ["theory", "demo"],
    "methods": [
        "theory", "demo", "--factor", "8", "--methods",
        "linear,abf,ntk,dynamic,dynamic-yarn,ntk-by-parts,yarn,llama3,p-rope,nope,rerope,self-extend",
        "--set", "abf.beta=50",
    ],
    "methods listed": ["methods"],
    "plan": ["plan", "demo", "--length", "1024", "--set", "data=demo-train"],
    "plan of an adapter": ["plan", "demo", "--length", "1024", "--set", "data=demo-train", "--set", "adapter=lora"],
}  # fmt: skip


def call(*arguments: object) -> Any:
    """The JSON that a command prints, or "exit N" after an error."""
    from ropecli.__main__ import main

    printed = io.StringIO()
    sys.argv = ["ropecli", *map(str, arguments)]
    code: object = 0
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
    if code:
        return f"exit {code}"
    text = printed.getvalue()
    return json.loads(text) if text.startswith(("{", "[")) else None


def types(model_type: str) -> dict[str, Any]:
    """The geometry of a type's default config, and the changes of every method."""
    with tempfile.TemporaryDirectory() as folder:
        config_of(model_type).save_pretrained(folder)
        found = {"inspect": call("inspect", folder, "--json")}
        if isinstance(found["inspect"], str):
            return found
        pairs = found["inspect"]["pairs"]
        factors = Path(folder) / "numbers"
        factors.write_text(json.dumps([1 + 3 * pair / max(1, pairs - 1) for pair in range(pairs)]))
        for method in FREQUENCY:
            options = SETTINGS.get(method, [])
            if method in ("longrope", "custom"):
                options = ["--factors-file", factors]
            done = call("patch", folder, "--method", method, "--factor", "4", *options, "--dry-run", "--json")
            found[method] = done if isinstance(done, str) else done["changes"]
        return found


def distances(method: str) -> Any:
    """The changes of a distance method to the demo's config.json, after the proof with a small model."""
    done = call("patch", "demo", "--method", method, "--factor", "4", "--dry-run", "--json")
    return done if isinstance(done, str) else done["changes"]


def evaluations(name: str) -> Any:
    return call(*EVALUATIONS[name], "--device", "cpu", "--json")


def theory(name: str) -> Any:
    return call(*THEORY[name], "--json")


def written(name: str) -> Any:
    """Hashes of the weights that a command writes, and its config.json."""
    commands = {
        "patched": ["patch", "demo", "--method", "yarn", "--factor", "4"],
        "fine-tuned": ["finetune", "demo", "--data", "demo-train", "--length", "256", *TRAINING],
        "fine-tuned pose": [
            "finetune", "demo", "--data", "demo-train", "--length", "128", "--positions", "pose", *TRAINING,
        ],
        "fine-tuned packed": [
            "finetune", "demo", "--data", "demo-train", "--length", "256", "--sequences", "packed", *TRAINING,
        ],
        "lora": ["finetune", "demo", "--data", "demo-train", "--length", "256", "--adapter", "lora", *TRAINING],
        "adapter": [
            "finetune", "demo", "--data", "demo-train", "--length", "256", "--adapter", "lora-plus",
            "--set", "save=adapter", *TRAINING,
        ],
        **{
            f"tuned {level}": [
                "tune", "demo", "--data", "demo-train", "--factor", "2", "--level", level, "--points", "3",
                "--steps", "2", "--population", "4", "--iterations", "1", "--max-documents", "12",
            ]
            for level in ("grid", "heads", "lora", "search")
        },
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        if isinstance(code := call(*commands[name], "--output", output), str):
            return code
        return {
            **{path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in output.glob("*.safetensors")},
            "config.json": json.loads((output / "config.json").read_text()),
        }


PARTS: dict[str, tuple[Callable[[str], Any], Callable[[], list[str]]]] = {
    "written": (
        written,
        lambda: [
            "patched", "fine-tuned", "fine-tuned pose", "fine-tuned packed", "lora", "adapter", "tuned grid",
            "tuned heads", "tuned lora", "tuned search",
        ],
    ),
    "evaluations": (evaluations, lambda: list(EVALUATIONS)),
    "distances": (distances, lambda: list(DISTANCE)),
    "theory": (theory, lambda: list(THEORY)),
    "types": (types, all_types),
}  # fmt: skip


def run(job: tuple[str, str]) -> tuple[str, dict[str, Any]]:
    part, name = job
    try:
        found = PARTS[part][0](name)
    except Exception as error:  # an unusable default config or a bug: recorded
        found = f"{type(error).__name__}"
    return f"{part}: {name}", dict(flattened(found))


def flattened(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, one in value.items():
            if key not in UNCOMPARED:
                yield from flattened(one, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(one, dict | list) for one in value):
        for index, one in enumerate(value):
            # identify a config.json change by its path, not by its index
            named = f" {one['path']}" if isinstance(one, dict) and "path" in one else f"[{index}]"
            yield from flattened(one, path + named)
    else:
        yield path, value


def measure(wanted: str) -> dict[str, dict[str, Any]]:
    jobs = [(part, name) for part, (_, names) in PARTS.items() for name in names() if wanted in f"{part}: {name}"]
    found = {}
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        for number, (job, values) in enumerate(pool.map(run, jobs), 1):
            found[job] = values
            print(f"{number} of {len(jobs)}: {job}", file=sys.stderr)
    return dict(sorted(found.items()))


def differences(before: dict[str, dict[str, Any]], now: dict[str, dict[str, Any]]) -> Iterator[str]:
    for job in sorted(before.keys() | now.keys()):
        for path in sorted(before.get(job, {}).keys() | now.get(job, {}).keys()):
            old, new = (values.get(job, {}).get(path, "absent") for values in (before, now))
            if old != new and not (job.startswith("evaluations") and is_close(old, new)):
                yield f"{job}: {path}: {old!r} before, {new!r} now"


def is_close(old: Any, new: Any) -> bool:
    """Rounding of matrix products depends on memory alignment, which differs between runs."""
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(is_close, old, new))
    return isinstance(old, float) and isinstance(new, float) and math.isclose(old, new, rel_tol=1e-6)


def main() -> None:
    if len(sys.argv) not in (3, 4) or sys.argv[1] not in ("record", "compare"):
        sys.exit("usage: scripts/same-numbers record|compare FILE [PART]")
    file, wanted = Path(sys.argv[2]), "".join(sys.argv[3:])
    found = json.loads(json.dumps(measure(wanted)))
    if sys.argv[1] == "record":
        file.write_text(json.dumps(found, indent=0) + "\n")
        print(f"{sum(map(len, found.values()))} values of {len(found)} runs: {file}")
        return
    before = {job: values for job, values in json.loads(file.read_text()).items() if wanted in job}
    lines = list(differences(before, found))
    print("\n".join(line[:300] for line in lines[:60]))
    print(f"{len(lines)} of {sum(map(len, before.values()))} values differ.")
    sys.exit(1 if lines else 0)


if __name__ == "__main__":
    main()
