"""Lists phrases that our users would not say, in code, tests, recipes and READMEs. Exits with 1 if there are any.

See "How we write" in .github/CONTRIBUTING.md. A list of phrases does not hear tone: read what you write aloud, too.
Also counts local names in ropecli/ that do not say what they hold (`--names` lists them), and warns of rooms that have
more lines than the table in .github/CONTRIBUTING.md; neither changes the exit status.
"""

import ast
import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PHRASES = (
    r"gone on with|go(es)? on with|\bgo(es)? on\b",
    r"\bmend(s|ed|ing)?\b",
    r"in place of",
    r"\b(at most|only the last|the last|first) so many\b|\bso many\b",
    r"as it (comes|came|stands)\b",
    r"beyond (all|any) (numbers|use)",
    r"cannot be had|\bto be had\b",
    r"\bwants? (a|an|of|no)\b",
    r"\bhas not the\b",
    r"\b(is|are|was) not gone by\b|\bgoes by\b",
    r"\b(is|are) no (?!longer|more|less|place)[a-z]+ (of|that|which)\b",
    r"\bbegin(s)? anew\b|\banew\b",
    r"\bpass(es|ed)? over in silence\b|\bis passed over\b",
    r"\bold window\b|\bnew window\b|\boriginal window\b",
    r"\bthat turn\b|\bpairs? turns?\b|\bturns? (faster|slower|further|at)\b|\bturning\b",
    r"\"\"\"(Of|Those|Whose|Where|Whom) [a-z]+",
    r"Doc\(\s*\"(Of|Those|Whose|How far) ",
)
EMPTY_NAMES = {"one", "found", "own", "other", "others", "asked", "wanted", "begun", "told", "settled", "reach"}

PATTERN = re.compile("|".join(f"(?:{phrase})" for phrase in PHRASES), re.IGNORECASE)


def files() -> list[Path]:
    found = [ROOT / "README.md", ROOT / ".github" / "CONTRIBUTING.md"]
    for folder in ("ropecli", "recipes", "scripts", "tests"):
        found += [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".yaml", ".html")]
    return sorted(path for path in found if path != Path(__file__).resolve())


def empty_names() -> list[str]:
    """Bindings of local names, parameters of lambdas and comprehensions included, that say nothing."""
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}: {name}"
        for path in sorted((ROOT / "ropecli").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in [bound(node)]
        if name in EMPTY_NAMES
    ]


def bound(node: ast.AST) -> str | None:
    """The name that a node binds."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    return node.arg if isinstance(node, ast.arg) else None


def grown_rooms() -> list[str]:
    """Rooms with more lines than the table in .github/CONTRIBUTING.md."""
    table = dict(
        re.findall(r"^\| `([\w/]+)` \| ([\d,]+) \|", (ROOT / ".github/CONTRIBUTING.md").read_text("utf-8"), re.M)
    )
    lines: Counter[str] = Counter()
    for path in (*(ROOT / "ropecli").rglob("*.py"), *(ROOT / "tests").rglob("*.py")):
        top, *rest = path.relative_to(ROOT).parts
        room = "tests" if top == "tests" else rest[0] if len(rest) > 1 else "ropecli"
        lines[room] += len(path.read_text(encoding="utf-8").splitlines())
    rooms = {room: int(count.replace(",", "")) for room, count in table.items()}
    print(f"{sum(lines.values()) - lines['tests']:,} lines in ropecli/, {lines['tests']:,} in tests/")
    return [
        f"{room} has {lines[room]:,} lines, {rooms.get(room, 0):,} in .github/CONTRIBUTING.md"
        for room in sorted(lines)
        if lines[room] > rooms.get(room, 0)
    ]


def main() -> None:
    hits = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if PATTERN.search(line)
    ]
    print("\n".join(hits))
    names = empty_names()
    print("\n".join(names) if "--names" in sys.argv else f"{len(names)} local names that say nothing (--names)")
    print("\n".join(f"warning: {room}. Change the table if that is needed." for room in grown_rooms()))
    sys.exit(bool(hits))


if __name__ == "__main__":
    main()
