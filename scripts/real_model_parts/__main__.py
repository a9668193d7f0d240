"""Runs the steps of `scripts/real_model`, one after the other; each is a command of ropecli that leaves a report."""

import argparse
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from real_model_parts.make import make
from real_model_parts.versions import make_versions

WORK = Path("runs/real-model")
_MODEL = f"{WORK}/SmolLM2-135M"
_HELD_OUT = f"--data {WORK}/held-out --dtype bfloat16"
_COMPARE = f"compare {_MODEL} {_HELD_OUT} --resume"
_FREQUENCY = "--methods none,linear,ntk,dynamic,dynamic-yarn,llama3,ntk-by-parts,yarn --factors 2"
_DISTANCE = "--methods none,yarn,rerope,self-extend,dual-chunk --factors 2 --max-documents 4"
_WINDOWS = "--methods lm-infinite,streaming,leaky-rerope,yarn+string --factors 2 --max-documents 4"
_TAIL = "--protocol tail --targets 2k"
_TRAIN = (
    f"--data {WORK}/training --adapter lora --set lora_rank=16 --set lora_alpha=32 --learning-rate 2e-4 "
    "--set warmup_steps=3 --length 2k --batch-size 1 --gradient-accumulation 2 --steps 40 --seed 0"
)
_AGAINST_BASE = f"eval-ppl {_MODEL} --baseline {_MODEL}"
_VERSIONS = f"--dtype bfloat16 --resume --protocol tail --targets 1k --data {WORK}/versions"
_AT_16K = f"{_VERSIONS}/16k --lengths 16k"
_AT_32K = f"{_VERSIONS}/32k --lengths 8k,32k --max-documents 4"
_YARN = f"eval-ppl {_MODEL} --methods yarn"
_TRAINED = f"eval-ppl {WORK}/yarn-x4-trained"
_DUAL_CHUNK = f"eval-ppl {_MODEL} --methods dual-chunk --factors 2"
_RECALL = f"--data {WORK}/held-out --dtype bfloat16 --resume --protocol recall --lengths 8k,12k,16k --max-documents 4"
_TEXTS = f"--data {WORK}/texts --max-documents 8 --serve llama.cpp --dtype bfloat16 --resume"
_EXTENDED = f"{WORK}/SmolLM2-16k-trained"
_RULER = f"--data {WORK}/calibration --dtype bfloat16 --resume --tasks"


class Step(NamedTuple):
    """minutes: on two cores with AMX for bfloat16; with AVX512-BF16 alone, measuring takes three times as long.

    command: of the program. folder: the checkpoint that it writes in WORK; without one, it writes a report.
    """

    minutes: float
    command: str
    folder: str = ""
    program: str = "ropecli"

    def output(self, name: str) -> Path:
        return WORK / (self.folder or f"reports/{name}.json")

    def words(self, name: str) -> str:
        return f"{self.program} {self.command} --output {self.output(name)}"

    def is_done(self, name: str) -> bool:
        made = "extend.json" if self.command.startswith("extend") else "config.json"
        return (self.output(name) / made if self.folder else self.output(name)).exists()


STEPS = {
    "smallest": Step(2, f"{_COMPARE} --methods none,yarn --factors 2 --lengths 4k,8k,16k --max-documents 2"),
    "prefix-x2-frequency": Step(32, f"{_COMPARE} {_FREQUENCY} --lengths 4k,8k,16k"),
    "prefix-x2-distance": Step(40, f"{_COMPARE} {_DISTANCE} --lengths 4k,8k,16k"),
    "prefix-x2-windows": Step(45, f"{_COMPARE} {_WINDOWS} --lengths 8k,16k"),
    "tail-x2": Step(15, f"{_COMPARE} --methods none,yarn,ntk --factors 2 {_TAIL} --lengths 8k,16k"),
    "tail-x2-distance": Step(
        16, f"{_COMPARE} --methods none,dual-chunk --factors 2 --max-documents 4 {_TAIL} --lengths 8k,16k"
    ),
    "patch": Step(1, f"patch {_MODEL} --method yarn --factor 2", "yarn-x2"),
    "train-yarn-x2": Step(
        14, f"finetune {WORK}/yarn-x2 {_TRAIN} --positions pose --set window=16k --resume", "yarn-x2-trained"
    ),
    "patch-x4": Step(1, f"patch {_MODEL} --method yarn --factor 4", "yarn-x4"),
    "train-yarn-x4": Step(
        14, f"finetune {WORK}/yarn-x4 {_TRAIN} --positions pose --set window=16k --resume", "yarn-x4-trained"
    ),
    "train-control": Step(14, f"finetune {_MODEL} {_TRAIN} --resume", "control"),
    "tail-trained": Step(
        8, f"eval-ppl {WORK}/yarn-x2-trained --baseline {WORK}/control {_HELD_OUT} {_TAIL} --lengths 4k,8k,16k --resume"
    ),
    "tail-x4": Step(
        9,
        f"eval-ppl {_MODEL} --baseline {_MODEL} --method yarn --factor 4 {_HELD_OUT} {_TAIL} --lengths 4k,8k,32k "
        "--max-documents 4 --resume",
    ),
    "tail-x4-distance": Step(
        50,
        f"eval-ppl {_MODEL} --baseline {_MODEL} --method dual-chunk --factor 4 {_HELD_OUT} {_TAIL} --lengths 8k,32k "
        "--max-documents 4 --resume",
    ),
    "versions-16k": Step(10, f"{_AGAINST_BASE} --methods yarn --factors 2,4 {_VERSIONS}/16k --lengths 8k,16k"),
    "versions-ceiling": Step(2, f"eval-ppl {_MODEL} {_VERSIONS}/ceiling --lengths 8k"),
    "versions-16k-control": Step(7, f"{_YARN} --factors 2,4 {_VERSIONS}/16k-control --lengths 16k"),
    # the attention factors of yarn ×2 and ×4, exchanged
    "versions-16k-cooler": Step(4, f"{_YARN} --factors 2 --set attention_factor=1.1386 {_AT_16K}"),
    "versions-16k-warmer": Step(4, f"{_YARN} --factors 4 --set attention_factor=1.0693 {_AT_16K}"),
    # what the text repeats from far: both corpora in float32, without AMX
    "copies-versions": Step(
        49, f"{_AGAINST_BASE} --methods yarn --factors 2,4 {_AT_16K.replace('bfloat16', 'float32')}"
    ),
    "copies-held-out": Step(
        49,
        f"{_AGAINST_BASE} --methods yarn --factors 2,4 --data {WORK}/held-out --dtype float32 {_TAIL} --lengths 16k "
        "--resume",
    ),
    "versions-12k": Step(8, f"{_AGAINST_BASE} --methods yarn --factors 2,4 {_VERSIONS}/12k --lengths 8k,12k"),
    "versions-12k-control": Step(5, f"{_YARN} --factors 2,4 {_VERSIONS}/12k-control --lengths 12k"),
    "versions-16k-x3": Step(4, f"{_YARN} --factors 3 {_AT_16K}"),
    "versions-12k-dual-chunk": Step(10, f"{_DUAL_CHUNK} {_VERSIONS}/12k --lengths 12k --max-documents 4"),
    "versions-16k-dual-chunk": Step(12, f"{_DUAL_CHUNK} {_AT_16K} --max-documents 4"),
    "versions-16k-rerope": Step(12, f"eval-ppl {_MODEL} --methods rerope --factors 2 {_AT_16K} --max-documents 4"),
    "versions-float32": Step(
        5, f"{_YARN} --factors 4 {_VERSIONS.replace('bfloat16', 'float32')}/16k --lengths 16k --max-documents 1"
    ),
    "versions-16k-trained-base": Step(2, f"eval-ppl {WORK}/control {_VERSIONS}/16k --lengths 8k"),
    "versions-16k-trained": Step(4, f"{_TRAINED} {_AT_16K}"),
    "versions-12k-trained-base": Step(2, f"eval-ppl {WORK}/control {_VERSIONS}/12k --lengths 8k"),
    "versions-16k-x2-trained": Step(4, f"eval-ppl {WORK}/yarn-x2-trained {_AT_16K}"),
    "versions-12k-trained": Step(3, f"{_TRAINED} {_VERSIONS}/12k --lengths 12k"),
    "recall-base": Step(6, f"eval-ppl {_MODEL} {_RECALL.replace('8k,12k,16k', '8k')}"),
    "recall-yarn-x2": Step(17, f"{_YARN} --factors 2 {_RECALL}"),
    "recall-yarn-x3": Step(17, f"{_YARN} --factors 3 {_RECALL}"),
    "recall-yarn-x4": Step(17, f"{_YARN} --factors 4 {_RECALL}"),
    "recall-llama3": Step(17, f"eval-ppl {_MODEL} --methods llama3 --factors 2 {_RECALL}"),
    "recall-distance": Step(375, f"eval-ppl {_MODEL} --methods dual-chunk,rerope,streaming --factors 2 {_RECALL}"),
    "recall-trained-base": Step(6, f"eval-ppl {WORK}/control {_RECALL.replace('8k,12k,16k', '8k')}"),
    "recall-trained": Step(17, f"{_TRAINED} {_RECALL}"),
    "extend-16k": Step(
        30, f"extend {_MODEL} {_HELD_OUT} --length 16k --serve llama.cpp --max-short-cost 20 --resume", "SmolLM2-16k"
    ),
    "extend-16k-trained": Step(
        75, f"extend {_MODEL} {_TEXTS} --length 16k --budget 20m --train 45m", "SmolLM2-16k-trained"
    ),
    "versions-16k-extended": Step(8, f"eval-ppl {_EXTENDED} {_VERSIONS}/16k --lengths 8k,16k"),
    "versions-16k-extended-control": Step(5, f"eval-ppl {_EXTENDED} {_VERSIONS}/16k-control --lengths 16k"),
    "served-16k": Step(
        30,
        f"{_EXTENDED} --base {_MODEL} --versions {WORK}/versions/16k",
        program="python -m real_model_parts.served",
    ),
    "questions-16k": Step(
        25,
        f"{WORK}/yarn-x4 {_EXTENDED} --base {_MODEL} --texts {WORK}/held-out {WORK}/calibration",
        program="python -m real_model_parts.questions",
    ),
    "extend-32k-trained": Step(
        130, f"extend {_MODEL} {_TEXTS} --length 32k --methods yarn --budget 25m --train 4", "SmolLM2-32k-trained"
    ),
    "versions-32k": Step(10, f"{_AGAINST_BASE} --methods yarn --factors 8 {_AT_32K}"),
    "versions-32k-extended": Step(9, f"eval-ppl {WORK}/SmolLM2-32k-trained {_AT_32K}"),
    "prefix-x4": Step(10, f"{_COMPARE} --methods none,yarn,ntk --factors 4 --lengths 8k,16k,32k --max-documents 4"),
    "float32": Step(
        5,
        f"compare {_MODEL} --data {WORK}/held-out --dtype float32 --methods none,yarn --factors 2 --lengths 4k,8k,16k "
        "--max-documents 2 --resume",
    ),
    "ruler-base": Step(7, f"ruler {_MODEL} {_RULER} niah_multikey_1,vt,cwe --lengths 2k,8k --samples 5"),
    # the base hardly solves the other two at any length
    "ruler-x2": Step(4, f"ruler {WORK}/yarn-x2 {_RULER} niah_multikey_1 --lengths 12k --samples 10"),
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
            print(f"{name} ({step.minutes:g} minutes)\n  {step.words(name)}")
        return
    make(WORK)
    make_versions(WORK)
    (WORK / "reports").mkdir(exist_ok=True)
    open_steps = [name for name in asked.steps or STEPS if name != "make" and not STEPS[name].is_done(name)]
    hours = sum(STEPS[name].minutes for name in open_steps) / 60
    print(f"{len(open_steps)} steps, some {hours:.1f} hours" if open_steps else f"{WORK} is complete.", flush=True)
    for name in open_steps:
        run(name, STEPS[name])


def run(name: str, step: Step) -> None:
    """Run a step. Raises SystemExit if it fails."""
    words = shlex.split(step.words(name))
    print(f"{name}: some {step.minutes:g} minutes\n$ {shlex.join(words)}", flush=True)
    begun = time.monotonic()
    if status := subprocess.run(words).returncode:
        sys.exit(f"{name} failed with status {status}")
    if (report := step.output(name) / "extend.json").exists():
        shutil.copy(report, WORK / f"reports/{name}.json")
    print(f"{name}: {(time.monotonic() - begun) / 60:.1f} minutes", flush=True)


if __name__ == "__main__":
    main()
