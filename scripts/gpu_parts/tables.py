"""Prints the rows of a part, and turns the results into Markdown. Needs only the standard library."""

from typing import Any

HIDDEN = "case"
"""A value that other parts need and no table shows."""


def shown(name: str, value: Any) -> str:
    """Format a value by its name: *_bytes in GiB or MiB, mfu and change in percent."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO" if name == "ok" else "no"
    if name.endswith("_bytes"):
        return f"{value / 2**30:,.2f} GiB" if value >= 2**28 else f"{value / 2**20:,.2f} MiB"
    if name in ("mfu", "change"):
        return f"{value:.1%}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def line(row: dict[str, Any]) -> str:
    return ", ".join(
        f"{title(name)} {shown(name, value)}" if isinstance(value, int | float) else str(value)
        for name, value in row.items()
        if value is not None and name != HIDDEN
    )


def title(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ")


def markdown(reports: list[dict[str, Any]]) -> str:
    """One table per section of each report. reports: as written by Part."""
    lines = []
    machine = None
    for report in reports:
        if report["machine"] != machine:
            machine = report["machine"]
            lines += [", ".join(f"{key} {value}" for key, value in machine.items()), ""]
        for name, rows in report["tables"].items():
            columns = list(dict.fromkeys(key for row in rows for key in row if key != HIDDEN))
            lines += [f"**{report['part']}: {name}**", "", f"| {' | '.join(map(title, columns))} |"]
            lines.append(f"| {' | '.join('---' for _ in columns)} |")
            lines += [f"| {' | '.join(shown(key, row.get(key)) for key in columns)} |" for row in rows]
            lines.append("")
    return "\n".join(lines)
