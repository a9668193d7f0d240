"""`ropecli methods`: all of the methods at a glance, or one in full, told by their own functions."""

import io
import json
import shlex

import pytest
import typer
from rich.console import Console

from ropecli.cli import terminal
from ropecli.cli.app import app
from ropecli.cli.methods import example, explanation, overview
from ropecli.rope import RopeGeometry, ScalingSpec
from ropecli.scaling.registry import get_method, scale, scaling_methods

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
    "custom": "longrope",
    "dynamic": "dynamic",
    "dynamic-yarn": "live only",
    "linear": "linear",
    "llama3": "llama3",
    "longrope": "longrope",
    "none": "default",
    "nope": "longrope",
    "ntk": "default",
    "ntk-by-parts": "yarn",
    "p-rope": "longrope",
    "yarn": "yarn",
    **dict.fromkeys(
        ("dual-chunk", "leaky-rerope", "lm-infinite", "rerope", "self-extend", "streaming"),
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
        method = get_method(name)
        assert about.startswith(method.summary)
        assert about.endswith(method.source)
        assert (written, training) == (WRITTEN[name], method.training)


def test_an_explanation_tells_everything_at_any_width():
    for name, method in scaling_methods().items():
        for width in (80, 100):
            lines = rendered(explanation(method), width)
            assert max(map(len, lines)) <= width
            assert "…" not in "".join(lines)
            text = " ".join(" ".join(lines).split())
            assert lines[0].strip() == name
            for fact in (" ".join(method.description.split()), method.source, method.training, *method.other_names):
                assert fact in text
        table = rows(lines)
        assert {key: cells[1] for key, cells in table.items()} == {knob.name: knob.kind for knob in method.knobs}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("yarn", "rope_type 'yarn' in config.json"),
        ("ntk", "rope_type 'default' in config.json"),
        ("p-rope", "rope_type 'longrope' in config.json, which holds a factor for each pair"),
        ("rerope", "the attention 'ropecli:rerope' in config.json, which transformers has after `import ropecli`"),
        ("dynamic-yarn", "nothing: config.json has no words for it"),
    ],
)
def test_an_explanation_says_what_is_written(name, said):
    text = " ".join(" ".join(rendered(explanation(get_method(name)), 80)).split())
    assert f"written as {said}" in text


def test_the_general_form_is_shown(ropecli):
    g, h = "m", "(1 - γ)·θ_d/s + γ·θ_d, γ from 0 at beta_slow turns to 1 at beta_fast"
    text = " ".join(" ".join(rendered(explanation(get_method("yarn")), 80)).split())
    assert f"position g(m) {g} frequency h(θ_d) {h} interpolation targeted training" in text
    method = json.loads(ropecli("methods", "yarn", "--json").out)
    assert (method["g"], method["h"], method["interpolation"]) == (g, h, "targeted")


def test_the_command_ends_with_an_example_in_one_line(ropecli, monkeypatch):
    monkeypatch.setattr(terminal, "out", Console(width=40))
    for name in ("yarn", "rerope"):
        outcome = ropecli("methods", name)
        assert (outcome.code, outcome.err) == (0, "")
        assert outcome.out.splitlines()[-1] == example(get_method(name))


def test_the_examples():
    examples = {name: example(get_method(name)) for name in ("yarn", "linear", "longrope", "custom", "dynamic-yarn")}
    assert examples == {
        "yarn": "ropecli patch CHECKPOINT --method yarn --factor 4 --set beta_fast=64 --output DIR",
        "linear": "ropecli patch CHECKPOINT --method linear --factor 4 --output DIR",
        "longrope": "ropecli patch CHECKPOINT --method longrope --factor 4 --factors-file FILE.json --output DIR",
        "custom": "ropecli patch CHECKPOINT --method custom --factor 4 --factors-file FILE.json --output DIR",
        "dynamic-yarn": "ropecli eval-ppl CHECKPOINT --data SOURCE --method dynamic-yarn --factor 4",
    }


def test_an_example_is_understood_and_does_something():
    """The command has the options, and the method takes the setting and changes by it."""
    for name in scaling_methods():
        _, command, *words = shlex.split(example(get_method(name)))
        parsed = typer.main.get_command(app).commands[command].make_context(command, words).params
        assert parsed["checkpoint"] == "CHECKPOINT"
        assert {name, 4.0} <= {value for value in parsed.values() if isinstance(value, str | float)}
        set_params = terminal.parse_settings(parsed.get("settings"))
        assert bool(parsed.get("factors_file")) == (name in NUMBERS)
        rope = RopeGeometry(32, 32, 1e4, 4096)
        ours = scale(rope, ScalingSpec(name, 4.0, {**NUMBERS.get(name, {}), **set_params}))
        if set_params and name != "abf":  # which does not run without
            assert (ours.inv_freq != scale(rope, ScalingSpec(name, 4.0)).inv_freq).any()


def test_all_as_json(ropecli):
    outcome = ropecli("methods", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    methods = json.loads(outcome.out)
    assert [method["name"] for method in methods] == list(scaling_methods())
    assert {method["name"]: method["written_as"] for method in methods} == WRITTEN
    for method in methods:
        assert set(method) == KEYS
        assert method["summary"]
        assert method["source"] == get_method(method["name"]).source


def test_one_as_json(ropecli):
    outcome = ropecli("methods", "longrope", "--json")
    method = json.loads(outcome.out)
    numbers = "a list of numbers from 0 on"
    assert method["parameters"] == [
        {"name": "long_factor", "kind": numbers, "default": None, "required": True},
        {"name": "short_factor", "kind": numbers, "default": None, "required": False},
        {"name": "attention_factor", "kind": "a positive number of at most 1e+30", "default": None, "required": False},
    ]
    assert (method["name"], method["rope_type"], method["depends_on_length"]) == ("longrope", "longrope", True)
    assert (method["training"], method["other_names"]) == ("by the factors", ["su"])


def test_the_defaults_in_json_are_those_that_hold(ropecli):
    """Given back as parameters they change nothing; what is required has none."""
    rope = RopeGeometry(32, 32, 1e4, 4096)
    for method in json.loads(ropecli("methods", "--json").out):
        needed = {"abf": {"beta": 2.0}, **NUMBERS}.get(method["name"], {})
        known = {knob["name"]: knob["default"] for knob in method["parameters"] if not knob["required"]}
        defaults = {key: value for key, value in known.items() if value is not None}
        specs = [ScalingSpec(method["name"], 4.0, params) for params in ({**defaults, **needed}, needed)]
        given, left_out = (scale(rope, spec) for spec in specs)
        assert (given.inv_freq == left_out.inv_freq).all()
        assert given.attention_factor == left_out.attention_factor


@pytest.mark.parametrize(
    ("typed", "hint"), [("yran", "Did you mean 'yarn'?"), ("pi", "Here it is called 'linear'."), ("", "Known: abf,")]
)
def test_an_unknown_method_is_refused(typed, hint, ropecli):
    outcome = ropecli("methods", typed, "--json")
    assert (outcome.code, outcome.out) == (2, "")
    assert f"Unknown method {typed!r}" in outcome.err
    assert hint in outcome.err
