"""Prints `ropecli methods`: a table of all, or one method in full."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ropecli.cli.terminal import out, show_tables, tell
from ropecli.commands.methods import example, written_as
from ropecli.table import Table

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from ropecli.commands.methods import MethodList
    from ropecli.scaling.method import Parameter, ScalingMethod


def render(listed: "MethodList") -> None:
    if not listed.one:
        out.print(overview(listed.methods))
        return
    (method,) = listed.methods
    show_tables(explanation(method))
    tell(f"\n{example(method)}")


def overview(methods: "Iterable[ScalingMethod]") -> "RichTable":
    """A table of methods that fits 80 columns."""
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    table = RichTable()
    table.add_column("method", no_wrap=True, style="bold")
    table.add_column("summary; parameters; source", ratio=1)
    table.add_column("written as", no_wrap=True)
    table.add_column("training", max_width=10)
    for method in methods:
        about = [Text(method.summary)]
        if method.parameters:
            defaults = {knob.name: _default(knob) for knob in method.parameters}
            shown = [f"{name}={default}" if default else name for name, default in defaults.items()]
            about.append(Text(", ".join(shown), style="cyan"))
        about.append(Text(method.source, style="dim"))
        table.add_row(method.name, Group(*about), written_as(method), method.training, end_section=True)
    return table


def explanation(method: "ScalingMethod") -> list[Table]:
    """One method: description, facts and parameters."""
    paragraphs = [" ".join(paragraph.split("\n")) for paragraph in method.description.split("\n\n")]
    written = f"rope_type {written_as(method)!r} in config.json"
    if method.remaps:
        written = (
            f"the attention 'ropecli:{method.distance or method}' in config.json; transformers needs "
            "`import ropecli.attention` to load it"
        )
    elif written_as(method) == "live only":
        written = "nothing: config.json cannot express it; it works only in memory"
    elif method.rope_type is None:
        written += ", with a factor per pair"
    facts = [
        ["source", method.source],
        ["position g(m)", method.g],
        ["frequency h(θ_d)", method.h],
        ["interpolation", method.interpolation],
        ["training", method.training],
        ["written as", written],
        ["also called", ", ".join(method.other_names)],
    ]
    rows = [
        [knob.name, knob.kind, "required" if knob.required else _default(knob) or "not set"]
        for knob in method.parameters
    ]
    tables = [Table(method.name, ["", ""], [fact for fact in facts if fact[1]], paragraphs, names=2)]
    return [*tables, Table("", ["parameter", "type", "default"], rows, names=3)] if rows else tables


def _default(parameter: "Parameter") -> str:
    """The default as text, or an empty string."""
    if isinstance(parameter.default, bool):
        return str(parameter.default).lower()
    return "" if parameter.default is None else f"{parameter.default:g}"
