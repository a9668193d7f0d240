"""`ropecli methods`: all methods at a glance, or one in full."""

import shlex

import typer

from ropecli.cli.app import app
from ropecli.cli.typer_command import parse_settings
from ropecli.commands.methods import example
from ropecli.rope import RopeGeometry
from ropecli.scaling.registry import find_method, scaling_methods
from ropecli.scaling.spec import make_spec, scale

GROUP = typer.main.get_command(app)
NUMBERS = {"longrope": {"long_factor": [1.0] * 16}, "custom": {"factors": [1.0] * 16}}  # what FILE.json holds


def test_an_example_is_understood():
    """The command has the options, and the method takes the setting."""
    for name in scaling_methods():
        _, command, *words = shlex.split(example(find_method(name)))
        parsed = GROUP.get_command(None, command).make_context(command, words).params
        assert parsed.get("checkpoint", parsed.get("checkpoints")) in ("CHECKPOINT", ("CHECKPOINT",))
        factor = 1.0 if name == "string" else 4.0
        assert parsed.get("method", parsed.get("methods")) == name
        assert float(parsed.get("factor", parsed.get("factors"))) == factor
        params = parse_settings(parsed.get("settings") or [])
        assert bool(parsed.get("factors_file")) == (name in NUMBERS)
        rope = RopeGeometry(32, 32, 1e4, 4096)
        scale(rope, make_spec(name, factor, {**NUMBERS.get(name, {}), **params}))
