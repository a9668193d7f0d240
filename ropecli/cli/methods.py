"""Renders `ropecli methods`: all of them in a table, or one in full."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ropecli.cli.terminal import out, tell
from ropecli.commands.methods import example, written_as

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from ropecli.commands.methods import MethodList
    from ropecli.scaling.method import Parameter, ScalingMethod


def render(listed: "MethodList") -> None:
    if not listed.one:
        out.print(overview(listed.methods))
        return
    (method,) = listed.methods
    out.print(explanation(method))
    tell(f"\n{example(method)}")  # whole, to be copied


def overview(methods: "Iterable[ScalingMethod]") -> "Table":
    """A line or two for each method; beside its words its parameters and its source, so that 80 columns suffice."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table()
    table.add_column("method", no_wrap=True, style="bold")
    table.add_column("what it does; parameters; source", ratio=1)
    table.add_column("written as", no_wrap=True)
    table.add_column("training", max_width=10)
    for method in methods:
        about = [Text(method.summary)]
        if method.parameters:
            about.append(Text(", ".join(map(_with_default, method.parameters)), style="cyan"))
        about.append(Text(method.source, style="dim"))
        table.add_row(method.name, Group(*about), written_as(method), method.training, end_section=True)
    return table


def explanation(method: "ScalingMethod") -> "Group":
    """All that there is to say of one method, but the example."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    paragraphs = [" ".join(paragraph.split("\n")) for paragraph in method.description.split("\n\n")]
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column()
    for name, fact in _details(method).items():
        if fact:
            facts.add_row(name, Text(fact))
    parts: list[Any] = [Text(method.name, style="bold"), Text("\n\n".join(paragraphs)), Text(), facts]
    if method.parameters:
        table = Table("parameter", "it must be", "default")
        for parameter in method.parameters:
            table.add_row(
                parameter.name,
                parameter.kind,
                "to be given" if parameter.required else _default(parameter) or "not set",
            )
        parts += [Text(), table]
    return Group(*parts)


def _details(method: "ScalingMethod") -> dict[str, str]:
    written = f"rope_type {written_as(method)!r} in config.json"
    if method.remaps:
        written = (
            f"the attention 'ropecli:{method.name}' in config.json, which transformers has after "
            "`import ropecli.attention`"
        )
    elif written_as(method) == "live only":
        written = "nothing: config.json has no words for it; it acts on the model in memory alone"
    elif method.rope_type is None:
        written += ", which holds a factor for each pair: there is no type of its own"
    return {
        "source": method.source,
        "position g(m)": method.g,
        "frequency h(θ_d)": method.h,
        "interpolation": method.interpolation,
        "training": method.training,
        "written as": written,
        "also called": ", ".join(method.other_names),
    }


def _with_default(parameter: "Parameter") -> str:
    return f"{parameter.name}={_default(parameter)}" if _default(parameter) else parameter.name


def _default(parameter: "Parameter") -> str:
    """Empty for none."""
    if isinstance(parameter.default, bool):
        return str(parameter.default).lower()  # as --set takes it
    return "" if parameter.default is None else f"{parameter.default:g}"
