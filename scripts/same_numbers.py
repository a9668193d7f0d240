"""Records the numbers printed by the command line, and compares them with a record of another commit.

Run by scripts/same-numbers. Covers the config.json changes (or refusal) of every method on every causal-LM type,
perplexity with every protocol and method, retrieval, RULER, theory, and the bytes of fine-tuned and tuned weights on
one CPU thread. Evaluations are compared by task, length, depth and statistic, and by the numbers of forward passes and
tokens read. Resumed runs and runs of two processes must equal uninterrupted runs of one process. Uses only the command
line, so the code behind it can be refactored. Times, memory, paths and sentences are not compared.
"""

import contextlib
import hashlib
import io
import json
import math
import multiprocessing
import os
import subprocess
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
SIX = ("--data", "demo", "--max-documents", "6")
EVALUATIONS = {
    "prefix": ["eval-ppl", "demo", *DEMO, "--lengths", "64,256,512"],
    "prefix in chunks": ["eval-ppl", "demo", *DEMO, "--lengths", "512", "--chunk", "100"],
    "tail": ["eval-ppl", "demo", *DEMO, "--lengths", "128,512", "--protocol", "tail"],
    "sliding": ["eval-ppl", "demo", *DEMO, "--lengths", "256", "--protocol", "sliding", "--max-tokens", "1000"],
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
    "passkey": ["needle", "demo", "--style", "passkey", "--lengths", "128,256", "--samples", "2"],
    "needle": ["needle", "demo", "--lengths", "128,256", "--samples", "2", "--depths", "0.2,0.8"],
    "needle generate": ["needle", "demo", "--lengths", "256", "--samples", "1", "--mode", "generate"],
    "prefix in batches": ["eval-ppl", "demo", *SIX, "--lengths", "64,256", "--batch-size", "3"],
    "sliding in batches": [
        "eval-ppl", "demo", *SIX, "--lengths", "128,256", "--protocol", "sliding", "--max-tokens", "400",
        "--batch-size", "3",
    ],
    "ruler": [
        "ruler", "demo", "--tasks", "niah_multivalue,fwe", "--lengths", "512,600", "--samples", "2", "--mode", "rank",
    ],
    "ruler generate": [
        "ruler", "demo", "--tasks", "fwe,niah_single_1", "--lengths", "400,512", "--samples", "4", "--batch-size", "3",
        "--method", "yarn", "--factor", "4",
    ],
    "recall": [
        "compare", "demo", *SIX, "--protocol", "recall", "--lengths", "256,512", "--methods", "none,yarn",
    ],
}  # fmt: skip
RESUMED = ("baseline", "sliding in batches", "ruler", "ruler generate")
TWO_PROCESSES = ("prefix", "ruler")
OF_REPORT = ("fingerprint", "too_short", "threshold", "effective_length")
"""Compared fields of a report that belong to no length."""
UNEQUAL = "differs from an uninterrupted run of one process"
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


def cells_of(report: dict[str, Any]) -> dict[tuple[str, int | None, float | None, str], Any]:
    """A report's values by task, length, depth and statistic. The task of perplexity is the protocol."""
    found = {(report["task"], None, None, name): report[name] for name in OF_REPORT if name in report}
    for cell in report["cells"]:
        place = cell["task"], cell["length"], cell.get("depth")
        found |= {(*place, name): cell[name] for name in cell.keys() - {"task", "length", "depth", *UNCOMPARED}}
    for row in report.get("rows", []):
        found |= {("change", row["length"], None, name): value for name, value in row.get("change", {}).items()}
    return found


def cells(printed: Any) -> Any:
    """The values of the reports that an evaluation prints."""
    if isinstance(printed, str):
        return printed
    return {
        f"{index} {report['method']} {report['factor']:g}": {
            " ".join("-" if part is None else f"{part}" for part in place): value
            for place, value in cells_of(report).items()
        }
        for index, report in enumerate(printed["reports"])
    }


@contextlib.contextmanager
def counted(stop: float = math.inf) -> Iterator[dict[str, int]]:
    """Count forward passes and the tokens that they read. stop: the pass at which Ctrl-C is pressed."""
    import torch

    counts = {"forward passes": 0, "tokens read": 0}

    def count(module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        if isinstance(module, torch.nn.Embedding):
            counts["forward passes"] += 1
            counts["tokens read"] += arguments[0].numel()
            if counts["forward passes"] == stop:
                raise KeyboardInterrupt

    hook = torch.nn.modules.module.register_module_forward_pre_hook(count)
    try:
        yield counts
    finally:
        hook.remove()


def evaluated(*arguments: object, stop: float = math.inf) -> dict[str, Any]:
    with counted(stop) as counts:
        return {"cells": cells(call(*arguments, "--device", "cpu", "--json")), **counts}


def evaluations(name: str) -> Any:
    return evaluated(*EVALUATIONS[name])


def resumed(name: str) -> Any:
    """A run that is interrupted at two thirds of its forward passes, and resumed."""
    whole = evaluated(*EVALUATIONS[name])
    with tempfile.TemporaryDirectory() as folder:
        command = [*EVALUATIONS[name], "--output", Path(folder) / "report.json"]
        first = evaluated(*command, stop=2 * whole["forward passes"] // 3)
        rest = evaluated(*command, "--resume")
    fewer = first["cells"] == "exit 130" and rest["forward passes"] < whole["forward passes"]
    return rest if fewer and is_close(rest["cells"], whole["cells"]) else UNEQUAL


def two_processes(name: str) -> Any:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "ropecli"]
    command = [*launcher, *EVALUATIONS[name], "--device", "cpu", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    shared = cells(json.loads(done.stdout) if done.returncode == 0 else f"exit {done.returncode}")
    return shared if is_close(shared, evaluated(*EVALUATIONS[name])["cells"]) else UNEQUAL


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
            "patched", "fine-tuned", "fine-tuned pose", "fine-tuned packed", "lora", "adapter",
        ],
    ),
    "evaluations": (evaluations, lambda: list(EVALUATIONS)),
    "evaluations resumed": (resumed, lambda: list(RESUMED)),
    "evaluations in two processes": (two_processes, lambda: list(TWO_PROCESSES)),
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
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() == new.keys() and all(is_close(old[key], new[key]) for key in old)
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(is_close, old, new))
    if isinstance(old, float) and isinstance(new, float):
        return math.isclose(old, new, rel_tol=1e-6)
    return old == new


def main() -> None:
    if len(sys.argv) not in (3, 4) or sys.argv[1] not in ("record", "compare"):
        sys.exit("usage: scripts/same-numbers record|compare FILE [PART]")
    file, wanted = Path(sys.argv[2]), "".join(sys.argv[3:])
    found = json.loads(json.dumps(measure(wanted)))
    if sys.argv[1] == "record":
        file.write_text(json.dumps(found, indent=0) + "\n")
        print(f"{sum(map(len, found.values()))} values of {len(found)} runs: {file}")
        sys.exit("\n".join(f"{job}: {UNEQUAL}" for job, values in found.items() if UNEQUAL in values.values()))
    before = {job: values for job, values in json.loads(file.read_text()).items() if wanted in job}
    lines = list(differences(before, found))
    print("\n".join(line[:300] for line in lines[:60]))
    print(f"{len(lines)} of {sum(map(len, before.values()))} values differ.")
    sys.exit(1 if lines else 0)


if __name__ == "__main__":
    main()
