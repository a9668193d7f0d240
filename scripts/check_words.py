"""Lists phrases that our users would not say, in code, recipes and READMEs. Exits with 1 if there are any.

See "How we write" in tests/README.md. A list of phrases does not hear tone: read what you write aloud, too.
"""

import re
import sys
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
PATTERN = re.compile("|".join(f"(?:{phrase})" for phrase in PHRASES), re.IGNORECASE)


def files() -> list[Path]:
    found = [ROOT / "README.md", ROOT / "tests" / "README.md"]
    for folder in ("ropecli", "recipes", "scripts"):
        found += [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".yaml", ".html")]
    return sorted(path for path in found if path != Path(__file__).resolve())


def main() -> None:
    hits = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if PATTERN.search(line)
    ]
    print("\n".join(hits))
    sys.exit(bool(hits))


if __name__ == "__main__":
    main()
