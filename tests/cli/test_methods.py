"""`ropecli methods`: all methods at a glance, or one in full."""

import io
import shlex

import pytest
import typer
from rich.console import Console, Group

from ropecli.cli import terminal
from ropecli.cli.app import app
from ropecli.cli.render import method_details, method_overview
from ropecli.commands.methods import example
from ropecli.reporting.terminal_table import TerminalTable
from ropecli.rope import RopeGeometry
from ropecli.scaling.registry import find_method, scaling_methods
from ropecli.scaling.scale import scale
from ropecli.scaling.spec import make_spec

KEYS = "name summary description source g h interpolation training rope_type written_as depends_on_length other_names"
WRITTEN = {
    "default": "abf none unscaled ntk",
    "longrope": "cope custom longrope nope p-rope resonance",
    "dynamic": "dynamic",
    "live only": "dynamic-yarn",
    "linear": "linear",
    "llama3": "llama3",
    "yarn": "ntk-by-parts yarn",
    "attention": "dual-chunk leaky-rerope lm-infinite rerope self-extend streaming string",
}
WRITTEN_AS = {name: kind for kind, names in WRITTEN.items() for name in names.split()}
NUMBERS = {"longrope": {"long_factor": [1.0] * 16}, "custom": {"factors": [1.0] * 16}}  # what FILE.json holds


def rendered(what, width: int) -> str:
    """The letters of what is drawn, without frames, spaces and line breaks."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(what)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    return "".join(text.replace("│", "").split())


@pytest.mark.parametrize("width", [80, 200])
def test_nothing_is_cut_off_at_any_width(width):
    for name, method in scaling_methods().items():
        row = rendered(method_overview([method]), width)
        for fact in (name, method.training, WRITTEN_AS[name]):
            assert "".join(fact.split()) in row
        page = rendered(Group(*map(TerminalTable, method_details(method))), width)
        facts = (name, method.description, method.source, method.training, *method.other_names)
        for fact in (*facts, *(part for knob in method.parameters for part in (knob.name, knob.kind))):
            assert "".join(fact.split()) in page


def test_the_command_ends_with_an_example_in_one_line(ropecli, monkeypatch):
    monkeypatch.setattr(terminal, "out", Console(width=40))
    for name in ("yarn", "rerope"):
        outcome = ropecli("methods", name).succeeds()
        assert outcome.out.splitlines()[-1] == example(find_method(name))


def test_an_example_is_understood_and_does_something():
    """The command has the options, and the method takes the setting and changes by it."""
    for name in scaling_methods():
        _, command, *words = shlex.split(example(find_method(name)))
        parsed = typer.main.get_command(app).commands[command].make_context(command, words).params
        assert parsed["checkpoint"] == "CHECKPOINT"
        factor = 1.0 if name == "string" else 4.0
        assert {name, factor} <= {value for value in parsed.values() if isinstance(value, str | float)}
        params = terminal.parse_settings(parsed.get("settings"))
        assert bool(parsed.get("factors_file")) == (name in NUMBERS)
        rope = RopeGeometry(32, 32, 1e4, 4096)
        ours = scale(rope, make_spec(name, factor, {**NUMBERS.get(name, {}), **params}))
        if params and name != "abf":  # which does not run without
            assert (ours.inv_freq != scale(rope, make_spec(name, 4.0)).inv_freq).any()


def test_all_as_json(ropecli):
    methods = ropecli("methods", "--json").json()
    assert [method["name"] for method in methods] == list(scaling_methods())
    assert {method["name"]: method["written_as"] for method in methods} == WRITTEN_AS
    assert all(set(method) == {*KEYS.split(), "parameters", "example"} for method in methods)
