"""Inspects and patches the config.json of released models, and compares what is known of them.

    python scripts/released_configs.py FOLDER [NAME ...]

FOLDER holds NAME.json, each a model's config.json, and expected.json: by NAME the pretraining_length, context_length,
method, factor (null: unknown), rope (whether it has rotary positions) and confidence. Exit status 1 if a `sure` value
differs, or a Python error shows.
"""

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import ropecli
from ropecli.errors import RopecliError

FIELDS = ("pretraining_length", "context_length", "method", "factor")


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
    rules = ", ".join(finding["rule"] for finding in report["findings"])
    said = f"{report['pretraining_length']} → {report['context_length']}, {report['method']} ×{report['factor']:g}"
    wrong = known["confidence"] == "sure" and bool(differing or not known["rope"])
    return "; ".join([said, *differing, *([f"findings: {rules}"] if rules else [])]), wrong


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
    wrong = 0
    with tempfile.TemporaryDirectory() as temporary:
        for name in names or expected:
            checkpoint = Path(temporary) / name
            checkpoint.mkdir()
            (checkpoint / "config.json").write_bytes((folder / f"{name}.json").read_bytes())
            said, differs = inspect(checkpoint, expected[name])
            wrong += differs
            print(f"{'WRONG ' if differs else ''}{name}\n  inspect  {said}")
            for factor in (2, 4):
                print(f"  yarn ×{factor}  {patch(checkpoint, factor)}".replace(str(checkpoint), name), flush=True)
    print(f"{len(names or expected)} configs, {wrong} differ")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
