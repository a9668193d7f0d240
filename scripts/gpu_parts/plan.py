"""The memory that `ropecli plan` predicts for each step that the part `train` measured."""

from functools import partial
from typing import Any

from bench_parts import plan as bench_plan

from gpu_parts import train
from gpu_parts.measuring import Part


def run(part: Part) -> None:
    measured = [
        (name, row)
        for name, rows in part.read("train").items()
        for row in rows
        if "case" in row and row["way"] != train.TRAINER
    ]
    if not measured:
        part.measure("memory of a step", {}, nothing_to_compare)
    for name, row in measured:
        labels = {"step": name, **{key: row[key] for key in ("layers", "tokens", "way")}}
        part.measure("memory of a step", labels, partial(compare, part, row), needs=15)


def compare(part: Part, row: dict[str, Any]) -> dict[str, Any]:
    """In a dry run the step is measured again, by torch's allocator for the CPU."""
    predicted = bench_plan.predict(row["case"], gpu=not part.toy)
    measured = bench_plan.allocated(row["case"]) if part.toy else row["peak_bytes"]
    return {
        "predicted_bytes": predicted,
        "measured_bytes": measured,
        "ratio": predicted / measured,
        "reserved_bytes": row["reserved_bytes"],
    }


def nothing_to_compare() -> dict[str, Any]:
    raise RuntimeError("no measured steps: run scripts/gpu train first")
