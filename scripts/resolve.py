"""Prints a Markdown table of the tools that pip can install in one environment with ropecli.

Resolves each tool's newest release together with the requirements in pyproject.toml (`pip install --dry-run`), for the
Python that runs this. Nothing is installed. Needs the package index.

    python scripts/resolve.py             # all tools, some minutes
    python scripts/resolve.py trl vllm    # these
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

TOOLS = ["trl", "axolotl", "llamafactory", "unsloth", "ms-swift", "torchtitan", "vllm", "sglang", "lm-eval"]
SHOWN = ["torch", "transformers", "accelerate", "datasets", "huggingface-hub", "typer"]
MINUTES = 15
ROOT = Path(__file__).parents[1]


def resolve(*requirements: str) -> tuple[list[dict[str, Any]], str]:
    """The packages that pip would install, and its messages. Packages without a wheel run their setup.py."""
    with tempfile.NamedTemporaryFile() as report:
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--prefer-binary"]
        command += ["--report", report.name, *requirements]
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=MINUTES * 60
            )
        except subprocess.TimeoutExpired:
            return [], f"ERROR: pip found no answer in {MINUTES} minutes"
        return (json.loads(Path(report.name).read_bytes())["install"] if done.returncode == 0 else []), done.stdout


def versions(install: list[dict[str, Any]]) -> dict[str, str]:
    return {re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower(): item["metadata"]["version"] for item in install}


def conflict(messages: str) -> str:
    """pip's reason in one line."""
    causes = messages.partition("The conflict is caused by:\n")[2].partition("\n\n")[0]
    lines = [line.strip().replace("The user requested", "ropecli needs") for line in causes.splitlines()]
    errors = [line.removeprefix("ERROR: ") for line in messages.splitlines() if line.startswith("ERROR: ")]
    return "; ".join(lines or errors[:1] or ["pip failed"])


def row(tool: str, floors: list[str]) -> list[str]:
    alone, messages = resolve("--no-deps", tool)
    if not alone:
        return [tool, "", conflict(messages), *[""] * len(SHOWN)]
    version = versions(alone)[tool]
    install, messages = resolve(f"{tool}=={version}", *floors)
    chosen = versions(install)
    return [tool, version, "yes" if install else conflict(messages), *(chosen.get(name, "") for name in SHOWN)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tools", nargs="*", default=TOOLS)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    heads = ["tool", "version", "resolves", *SHOWN]
    for cells in (heads, ["---"] * len(heads)):
        print("| " + " | ".join(cells) + " |")
    for tool in parser.parse_args().tools:
        print("| " + " | ".join(row(tool, project["dependencies"])) + " |", flush=True)


if __name__ == "__main__":
    main()
