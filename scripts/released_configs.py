"""Inspects and patches the config.json of released models, and compares what is known of them.

    python scripts/released_configs.py FOLDER [NAME ...]

FOLDER holds NAME.json, each a model's config.json, and expected.json: by NAME the pretraining_length, context_length,
method, factor (null: unknown), rope (whether it has rotary positions), layers (which have the main rope) and
confidence. Exit status 1 if a `sure` value differs, or a Python error shows.

Of the text in `layers`, these are compared: "all", or the name of a kind of layer or of its rope, at the start; "1 of
N"; "window N" of all layers; "base N" of the main rope.
"""

import json
import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import ropecli
from ropecli.errors import RopecliError

FIELDS = ("pretraining_length", "context_length", "method", "factor")


UNKNOWN = "layers unknown"


def inspect(folder: Path, known: dict) -> tuple[str, bool]:
    """What `inspect` says, and whether a sure value differs."""
    try:
        report = ropecli.inspect(str(folder)).reports[0]
    except RopecliError as error:
        return f"refused: {error}", False
    differing = [
        f"{key} {report[key]} (expected {known[key]})"
        for key in FIELDS
        if known[key] is not None and differ(report[key], known[key])
    ]
    if any(kind["rotates"] is None or kind["attention"] is None for kind in report["layers"]):
        layers = f"{UNKNOWN} (expected {known['layers']})"
    else:
        layers = f"layers {', '.join(describe(kind) for kind in report['layers'])} ({known['layers']})"
        differing += [f"layers: {wrong}" for wrong in differing_layers(report, known["layers"])]
    rules = ", ".join(finding["rule"] for finding in report["findings"])
    said = f"{report['pretraining_length']} → {report['context_length']}, {report['method']} ×{report['factor']:g}"
    wrong = known["confidence"] == "sure" and bool(differing or not known["rope"])
    return "; ".join([said, layers, *differing, *([f"findings: {rules}"] if rules else [])]), wrong


def describe(kind: dict) -> str:
    return f"{kind['count']} {kind['attention']} {'rotary' if kind['rotates'] else 'without positions'}"


def differing_layers(report: dict, expected: str) -> list[str]:
    """What `inspect` says of the layers with the main rope, where `expected` says something else."""
    layers = [kind for kind in report["layers"] if kind["attention"] != "other"]
    main = [kind for kind in layers if all(kind.get(key) == report[key] for key in ("rope_theta", "method", "factor"))]
    name = expected.split()[0].strip(",:").removesuffix("_attention")
    attending = [kind for kind in layers if kind["attention"] != "recurrent"]
    due = [kind for kind in attending if name in ("all", kind["attention"], kind["layer_type"])]
    wrong = [] if main == due else [f"the main rope is of {', '.join(map(describe, main)) or 'none'}"]
    if of := re.search(r"1 of (\d+)", expected):
        count, total = (sum(kind["count"] for kind in kinds) for kinds in (main, layers))
        wrong += [f"{count} of {total}"] * (abs(count - total / int(of[1])) >= 1)
    if (window := re.search(r"window (\d+)", expected)) and {kind["window"] for kind in layers} != {int(window[1])}:
        wrong.append(f"windows {[kind['window'] for kind in layers]}")
    if (base := re.search(r"base (\d+)", expected)) and report["rope_theta"] != int(base[1]):
        wrong.append(f"base {report['rope_theta']:g}")
    return wrong


def differ(value: object, known: object) -> bool:
    return value != known if isinstance(known, str) else abs(float(value) - float(known)) > 1e-9  # type: ignore[arg-type]


def patch(folder: Path, factor: int) -> str:
    try:
        result = ropecli.patch(str(folder), method="yarn", factor=factor, dry_run=True)
    except RopecliError as error:
        return f"refused: {error}"
    return f"{result.plan.positions.context_length} tokens, {result.proved} tables proved"


def main(folder: Path, names: list[str]) -> int:
    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    wrong, unknown = 0, []
    with tempfile.TemporaryDirectory() as temporary:
        for name in names or expected:
            checkpoint = Path(temporary) / name
            checkpoint.mkdir()
            (checkpoint / "config.json").write_bytes((folder / f"{name}.json").read_bytes())
            said, differs = inspect(checkpoint, expected[name])
            wrong += differs
            unknown += [name] if UNKNOWN in said else []
            print(f"{'WRONG ' if differs else ''}{name}\n  inspect  {said}")
            for factor in (2, 4):
                print(f"  yarn ×{factor}  {patch(checkpoint, factor)}".replace(str(checkpoint), name), flush=True)
    print(f"{len(names or expected)} configs, {wrong} differ; layers unknown, not compared: {', '.join(unknown)}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
