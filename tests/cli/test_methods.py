"""`ropecli methods`: all of the methods at a glance, or one in full, told by their own functions."""

import io
import json
import shlex

import pytest
import typer
from rich.console import Console, Group

from ropecli.cli import terminal
from ropecli.cli.app import app
from ropecli.cli.methods import example, explanation, overview
from ropecli.reporting.terminal_table import TerminalTable
from ropecli.rope import RopeGeometry
from ropecli.scaling.registry import find_method, scaling_methods
from ropecli.scaling.scale import scale
from ropecli.scaling.spec import make_spec

KEYS = {
    "name",
    "summary",
    "description",
    "source",
    "g",
    "h",
    "interpolation",
    "training",
    "rope_type",
    "written_as",
    "depends_on_length",
    "other_names",
    "parameters",
    "example",
}
WRITTEN = {
    "abf": "default",
    "cope": "longrope",
    "custom": "longrope",
    "dynamic": "dynamic",
    "dynamic-yarn": "live only",
    "linear": "linear",
    "llama3": "llama3",
    "longrope": "longrope",
    "none": "default",
    "unscaled": "default",
    "nope": "longrope",
    "ntk": "default",
    "ntk-by-parts": "yarn",
    "p-rope": "longrope",
    "resonance": "longrope",
    "yarn": "yarn",
    **dict.fromkeys(
        ("dual-chunk", "leaky-rerope", "lm-infinite", "rerope", "self-extend", "streaming", "string"),
        "attention",
    ),
}
NUMBERS = {"longrope": {"long_factor": [1.0] * 16}, "custom": {"factors": [1.0] * 16}}  # what FILE.json holds


def rendered(what, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(what)
    return console.file.getvalue().splitlines()


def rows(lines: list[str]) -> dict[str, list[str]]:
    """By method the text of each column of a drawn table, its lines put together."""
    found: dict[str, list[str]] = {}
    for line in lines:
        cells = [cell.strip() for cell in line.split("│")[1:-1]]
        if not cells:
            continue
        if cells[0]:
            found[cells[0]] = current = [""] * len(cells)
        current[:] = [f"{old} {new}".strip() for old, new in zip(current, cells, strict=True)]
    return found


@pytest.mark.parametrize("width", [80, 200])
def test_the_overview_tells_everything_at_any_width(width):
    lines = rendered(overview(scaling_methods().values()), width)
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
    table = rows(lines)
    assert list(table) == list(scaling_methods())
    for name, (_, about, written, training) in table.items():
        method = find_method(name)
        assert about.startswith(method.summary)
        assert about.endswith(method.source)
        assert (written, training) == (WRITTEN[name], method.training)


def test_an_explanation_tells_everything_at_any_width():
    for name, method in scaling_methods().items():
        for width in (80, 100):
            lines = rendered(Group(*map(TerminalTable, explanation(method))), width)
            assert max(map(len, lines)) <= width
            assert "…" not in "".join(lines)
            text = "".join("".join(lines).replace("│", "").split())
            assert lines[0].strip() == name
            for fact in (" ".join(method.description.split()), method.source, method.training, *method.other_names):
                assert "".join(fact.split()) in text
        table = rows(lines)
        kinds = {key: cells[1] for key, cells in table.items() if len(cells) == 3}
        assert kinds == {knob.name: knob.kind for knob in method.parameters}


def test_the_command_ends_with_an_example_in_one_line(ropecli, monkeypatch):
    monkeypatch.setattr(terminal, "out", Console(width=40))
    for name in ("yarn", "rerope"):
        outcome = ropecli("methods", name)
        assert (outcome.code, outcome.err) == (0, "")
        assert outcome.out.splitlines()[-1] == example(find_method(name))


def test_an_example_is_understood_and_does_something():
    """The command has the options, and the method takes the setting and changes by it."""
    for name in scaling_methods():
        _, command, *words = shlex.split(example(find_method(name)))
        parsed = typer.main.get_command(app).commands[command].make_context(command, words).params
        assert parsed["checkpoint"] == "CHECKPOINT"
        factor = 1.0 if name == "string" else 4.0
        assert {name, factor} <= {value for value in parsed.values() if isinstance(value, str | float)}
        set_params = terminal.parse_settings(parsed.get("settings"))
        assert bool(parsed.get("factors_file")) == (name in NUMBERS)
        rope = RopeGeometry(32, 32, 1e4, 4096)
        ours = scale(rope, make_spec(name, factor, {**NUMBERS.get(name, {}), **set_params}))
        if set_params and name != "abf":  # which does not run without
            assert (ours.inv_freq != scale(rope, make_spec(name, 4.0)).inv_freq).any()


def test_all_as_json(ropecli):
    outcome = ropecli("methods", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    methods = json.loads(outcome.out)
    assert [method["name"] for method in methods] == list(scaling_methods())
    assert {method["name"]: method["written_as"] for method in methods} == WRITTEN
    for method in methods:
        assert set(method) == KEYS
        assert method["summary"]
        assert method["source"] == find_method(method["name"]).source
