"""Runs the parts of `scripts/gpu`, each in a process of its own, and writes runs/gpu/*.json and results.md."""

import argparse
import importlib
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = {
    "check": 5,
    "eval": 4,
    "train": 7,
    "plan": 2,
    "attention": 3,
    "several": 4,
}
"""Parts in the order of their value, and the minutes that each may take."""
_LEAST = 30
_GRACE = 20
"""Seconds: less than _LEAST is too little to start a part; after _GRACE more than its time, a part is killed."""


def main() -> None:
    asked = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that start_part stops its part
    if asked.only:
        run_part(asked)
        return
    os.environ["PYTHONPATH"] = f"{install_wheels(asked)}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    asked.output.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + asked.budget
    failed = []
    for name in asked.parts or PARTS:
        seconds = min(PARTS[name] * 60, end - time.monotonic())
        if seconds < _LEAST:
            print(f"{name}: not run, no time left of --budget", flush=True)
            continue
        begun = time.monotonic()
        fault = start_part(name, seconds, asked)
        print(f"{name}: {fault or 'done'} ({time.monotonic() - begun:.0f} s)", flush=True)
        failed += [name] if fault else []
        write_tables(asked.output)
    print(f"Results: {asked.output / 'results.md'}")
    if failed:
        sys.exit(f"Failed: {', '.join(failed)}. Their logs are in {asked.output}.")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/gpu", description="Check and measure ropecli on GPUs.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: all of {', '.join(PARTS)}")
    parser.add_argument("--budget", type=parse_minutes, default="25m", help="total time, such as 25m (default)")
    parser.add_argument("--dry-run", action="store_true", help="every part at toy size on the CPU")
    parser.add_argument("--output", type=Path, help="folder of the results; default: runs/gpu")
    parser.add_argument("--wheels", type=Path, default=Path("wheels"), help="wheels of missing packages")
    parser.add_argument("--only", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if unknown := [name for name in asked.parts if name not in PARTS]:
        parser.error(f"unknown part {unknown[0]}; expected {', '.join(PARTS)}")
    asked.output = (asked.output or ROOT / "runs" / f"gpu{'-dry-run' * asked.dry_run}").absolute()
    return asked


def parse_minutes(text: str) -> float:
    """Seconds of '25m', '90s' or '1h'."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a time such as 25m")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]


def missing_packages() -> list[str]:
    """Required packages of pyproject.toml that this Python lacks."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    required = re.search(r"^dependencies = \[(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    assert required, "pyproject.toml has no dependencies"
    missing = []
    for name in re.findall(r'"([\w-]+)', required[1]):
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    return missing


def install_wheels(asked: argparse.Namespace) -> str:
    """Install the files of --wheels if packages are missing. Returns the folder, or '' if none are missing."""
    missing = missing_packages()
    if not missing:
        return ""
    wheels = sorted(asked.wheels.glob("*.whl"))
    if not wheels:
        sys.exit(
            f"Missing packages: {', '.join(missing)}. Install them, or on a machine without network, put their wheels "
            f"and those of their dependencies into {asked.wheels}/ (python -m pip download --dest {asked.wheels} NAME)."
        )
    folder = asked.output / "packages"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--upgrade", "--target"]
    subprocess.run([*pip, folder, *wheels], check=True)
    return str(folder)


def start_part(name: str, seconds: float, asked: argparse.Namespace) -> str:
    """Run a part; its rows are printed as they are measured. Returns why it failed, or ''."""
    command = [sys.executable, "-m", "gpu_parts", "--only", name, "--seconds", str(seconds)]
    command += ["--output", asked.output, *(["--dry-run"] if asked.dry_run else [])]
    # with several GPUs in sight, Trainer would use them all
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    environment = os.environ if name == "several" else {**os.environ, "CUDA_VISIBLE_DEVICES": first}
    with (asked.output / f"{name}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, stderr=log, env=environment, start_new_session=True)
        try:
            status = process.wait(seconds + _GRACE)
        except subprocess.TimeoutExpired:
            status = None
        except BaseException:
            stop(process)
            raise
        if status is None:
            stop(process)
            return f"stopped after {seconds + _GRACE:.0f} s"
    if status == 0:
        return ""
    lines = (asked.output / f"{name}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"failed: {lines[-1] if lines else f'status {status}'}"


def stop(process: subprocess.Popen) -> None:
    """Kill a part and the processes that it started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_part(asked: argparse.Namespace) -> None:
    from gpu_parts.measuring import Part

    part = Part(asked.only, asked.dry_run, asked.output, asked.seconds)
    importlib.import_module(f"gpu_parts.{'evaluate' if asked.only == 'eval' else asked.only}").run(part)
    sys.exit(1 if part.failed else 0)


def write_tables(folder: Path) -> None:
    """Write results.md from the results of all parts."""
    from gpu_parts.tables import markdown

    found = {name: folder / f"{name}.json" for name in PARTS}
    reports = [json.loads(file.read_text(encoding="utf-8")) for file in found.values() if file.exists()]
    (folder / "results.md").write_text(markdown(reports), encoding="utf-8")


if __name__ == "__main__":
    main()
