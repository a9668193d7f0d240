"""Runs the steps of `scripts/real_model`, one after the other; each is a command of ropecli that leaves a report."""

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from real_model_parts.make import make

WORK = Path("runs/real-model")
_MODEL = f"{WORK}/SmolLM2-135M"
_HELD_OUT = f"--data {WORK}/held-out --dtype bfloat16"
_COMPARE = f"compare {_MODEL} {_HELD_OUT}"
_FREQUENCY = "--methods none,linear,ntk,dynamic,dynamic-yarn,llama3,ntk-by-parts,yarn --factors 2"
_DISTANCE = "--methods none,yarn,rerope,self-extend,dual-chunk --factors 2 --max-documents 4"
_FOUR = "--methods none,yarn --factors 4 --max-documents 4"
_TAIL = "--protocol tail --targets 2k"


class Step(NamedTuple):
    """minutes: on two cores with AMX. output: what the step leaves in WORK. command: of ropecli."""

    minutes: float
    output: str
    command: str


STEPS = {
    "smallest": Step(
        2,
        "reports/smallest.json",
        f"{_COMPARE} --methods none,yarn --factors 2 --lengths 4k,8k,16k --max-documents 2",
    ),
    "prefix-x2-frequency": Step(32, "reports/prefix-x2-frequency.json", f"{_COMPARE} {_FREQUENCY} --lengths 4k,8k,16k"),
    "prefix-x2-distance": Step(40, "reports/prefix-x2-distance.json", f"{_COMPARE} {_DISTANCE} --lengths 4k,8k,16k"),
    "tail-x2": Step(
        15, "reports/tail-x2.json", f"{_COMPARE} --methods none,yarn,ntk --factors 2 {_TAIL} --lengths 8k,16k"
    ),
    "tail-x2-distance": Step(
        16,
        "reports/tail-x2-distance.json",
        f"{_COMPARE} --methods none,dual-chunk --factors 2 --max-documents 4 {_TAIL} --lengths 8k,16k",
    ),
    "tail-x4": Step(14, "reports/tail-x4.json", f"{_COMPARE} {_FOUR} {_TAIL} --lengths 8k,32k"),
    "float32": Step(
        8,
        "reports/float32.json",
        f"compare {_MODEL} --data {WORK}/held-out --dtype float32 --methods none,yarn --factors 2 --lengths 4k,8k,16k "
        "--max-documents 2",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/real_model", description="Extend and measure a real model.")
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"make, {', '.join(STEPS)}; default: all")
    parser.add_argument("--list", action="store_true", help="print the steps, their commands and minutes")
    asked = parser.parse_args()
    if unknown := set(asked.steps) - {*STEPS, "make"}:
        parser.error(f"unknown step {sorted(unknown)[0]}; expected make, {', '.join(STEPS)}")
    if asked.list:
        for name, step in STEPS.items():
            print(f"{name} ({step.minutes:g} minutes)\n  ropecli {step.command} --output {WORK / step.output}")
        return
    make(WORK)
    (WORK / "reports").mkdir(exist_ok=True)
    open_steps = [name for name in asked.steps or STEPS if name != "make" and not (WORK / STEPS[name].output).exists()]
    print(f"{len(open_steps)} steps, some {sum(STEPS[name].minutes for name in open_steps) / 60:.1f} hours", flush=True)
    for name in open_steps:
        run(name, STEPS[name])


def run(name: str, step: Step) -> None:
    """Run a step. Raises SystemExit if it fails."""
    words = shlex.split(f"ropecli {step.command} --output {WORK / step.output} --resume")
    print(f"{name}: some {step.minutes:g} minutes\n$ {shlex.join(words)}", flush=True)
    begun = time.monotonic()
    if status := subprocess.run(words).returncode:
        sys.exit(f"{name} failed with status {status}")
    print(f"{name}: {(time.monotonic() - begun) / 60:.1f} minutes", flush=True)


if __name__ == "__main__":
    main()
