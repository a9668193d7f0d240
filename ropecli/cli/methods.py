"""ropecli methods: what the scaling methods are, as their own functions tell it."""

from typing import Annotated, Any

import typer

from ropecli.cli import options

# A setting worth showing in the example, where the method has one that is not obvious; abf does not run without.
_SETTINGS = {
    "abf": "rope_theta=500000",
    "llama3": "high_freq_factor=8",
    "ntk-by-parts": "beta_fast=64",
    "p-rope": "p=0.5",
    "yarn": "beta_fast=64",
}


def command(
    method: Annotated[str | None, typer.Argument(help="One of them, to be explained; without it, all.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """List the scaling methods, or explain one: what it does, its parameters, how it is written, its source."""
    from ropecli.cli.terminal import out, print_json
    from ropecli.scaling.registry import find_method, scaling_methods

    if method is None:
        if as_json:
            print_json([_as_json(one) for one in scaling_methods().values()])
        else:
            out.print(overview(scaling_methods().values()))
        return
    found = find_method(method)
    if as_json:
        print_json(_as_json(found))
        return
    out.print(explanation(found))
    out.print(f"\n{example(found)}", markup=False, soft_wrap=True)  # whole, to be copied


def written_as(method) -> str:
    """The rope_type that stock readers find in config.json, or `live only` where it has no words for the method.

    `attention`: no rope_type, but an attention of ours that config.json names.
    """
    if method.rope_type is not None:
        return method.rope_type
    if method.remaps:
        return "attention"
    return "live only" if method.depends_on_length else "longrope"


def example(method) -> str:
    """A command that uses the method."""
    from ropecli.scaling.method import LIST

    use = f"--method {method.name} --factor 4"
    if written_as(method) == "live only":
        return f"ropecli eval-ppl CHECKPOINT --data SOURCE {use}"
    if any(knob.kind == LIST for knob in method.parameters):
        use += " --factors-file FILE.json"
    elif method.name in _SETTINGS:
        use += f" --set {_SETTINGS[method.name]}"
    return f"ropecli patch CHECKPOINT {use} --output DIR"


def overview(methods):
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
            about.append(Text(", ".join(map(_knob, method.parameters)), style="cyan"))
        about.append(Text(method.source, style="dim"))
        table.add_row(method.name, Group(*about), written_as(method), method.training, end_section=True)
    return table


def explanation(method):
    """All that there is to say of one method, but the example."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    paragraphs = [" ".join(paragraph.split("\n")) for paragraph in method.description.split("\n\n")]
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column()
    for name, fact in _facts(method).items():
        if fact:
            facts.add_row(name, Text(fact))
    parts: list[Any] = [Text(method.name, style="bold"), Text("\n\n".join(paragraphs)), Text(), facts]
    if method.parameters:
        table = Table("parameter", "it must be", "default")
        for knob in method.parameters:
            table.add_row(knob.name, knob.kind, "to be given" if knob.required else _default(knob) or "not set")
        parts += [Text(), table]
    return Group(*parts)


def _facts(method) -> dict[str, str]:
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


def _as_json(method) -> dict[str, Any]:
    return {
        "name": method.name,
        "summary": method.summary,
        "description": method.description,
        "source": method.source,
        "g": method.g,
        "h": method.h,
        "interpolation": method.interpolation,
        "training": method.training,
        "rope_type": method.rope_type,
        "written_as": written_as(method),
        "depends_on_length": method.depends_on_length,
        "other_names": list(method.other_names),
        "parameters": [knob._asdict() for knob in method.parameters],
        "example": example(method),
    }


def _knob(knob) -> str:
    return f"{knob.name}={_default(knob)}" if _default(knob) else knob.name


def _default(knob) -> str:
    """Empty for none."""
    if isinstance(knob.default, bool):
        return str(knob.default).lower()  # as --set takes it
    return "" if knob.default is None else f"{knob.default:g}"
