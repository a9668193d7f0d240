"""The README's commands are commands of this program, with options that it has."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from ropecli.cli.app import app
from ropecli.demo import corpus

GROUP = typer.main.get_command(app)
ROOT = Path(__file__).parent.parent
LINKED = [
    *ROOT.glob("*.md"),
    *(page for folder in (".github", "recipes", "ropecli", "scripts") for page in (ROOT / folder).rglob("*.md")),
]
PAGES = [ROOT / "README.md", ROOT / "recipes" / "README.md", *sorted((ROOT / "ropecli").glob("*/README.md"))]
PLACEHOLDERS = {
    "ADAPTER": "adapter",
    "BASE": "demo",
    "CHECKPOINT": "demo",
    "DIR": "out",
    "DRAFTER": "demo",
    "SOURCE": "demo",
    "FILE": "file.yaml",
    "FILE.html": "page.html",
    "REPORT": "report.json",
    "[...]": "",
    "...": "",
}


def commands() -> list[str]:
    """Without comments and redirections."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    inline = [" ".join(span.split()) for span in re.findall(r"`(ropecli [^`]*)`", text)]
    found = [re.split("[#>]", line)[0].strip() for line in [*lines, *inline] if line.startswith("ropecli ")]
    return [line for line in found if len(line.split()) > 2]  # `ropecli finetune` alone names a command


def test_there_are_commands_for_everything():
    names = {command.split()[1] for command in commands()}
    assert names == set(GROUP.list_commands(None))


def test_every_command_is_understood():
    for line in commands():
        _, name, *words = [PLACEHOLDERS.get(word, word) for word in shlex.split(line)]
        command = GROUP.get_command(None, name)
        parsed = command.make_context(name, [word for word in words if word])
        arguments = [parameter.name for parameter in command.params if parameter.param_type_name == "argument"]
        assert all(parsed.params[name] for name in arguments[:1]), line


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def test_the_python_example_runs(tmp_path, monkeypatch):
    [block] = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    monkeypatch.chdir(tmp_path)
    few = dict([*corpus.held_out_files().items()][:5])
    monkeypatch.setattr(corpus, "held_out_files", lambda root=None: few)
    names: dict = {}
    exec(block, names)
    assert (tmp_path / "yarn-x4" / "config.json").is_file()
    assert [cell.length for cell in names["extended"].cells] == [256, 1024]
