"""What `ropecli theory` shows in the terminal, of the report that checkpoint.study makes: tables, and sentences."""

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ropecli.report.theory.bands import bands_table
from ropecli.report.theory.decay import decay_table
from ropecli.report.theory.quantities import forms_table, quantities_table
from ropecli.report.theory.sentences import sentences
from ropecli.report.wording import clean


def theory_tables(report: dict[str, Any]) -> Group:
    """report: of study_report."""
    ropes = report["ropes"]
    layers = f" (layers of type {clean(ropes[0]['layer_type'])})" if ropes[0]["layer_type"] else ""
    window, target = report["original_max_position_embeddings"], report["target_length"]
    title = f"{clean(report['checkpoint'])}{layers}: pretrained with {window:,} tokens, to read {target:,}"
    parts: list[RenderableType] = [Text(title, "bold")]
    if len(ropes) > 1:
        parts += forms_table(ropes[1:])
    parts += [Text("\nquantities"), quantities_table(ropes), *bands_table(ropes), *decay_table(ropes[-1])]
    for sentence in sentences(report):
        parts += [Text(), Text(sentence)]
    return Group(*parts)
