"""Renders `ropecli tune`."""

from typing import TYPE_CHECKING

from ropecli.cli.terminal import out, tell

if TYPE_CHECKING:
    from ropecli.commands.tune import TunedCheckpoint


def render(result: "TunedCheckpoint") -> None:
    from ropecli.reporting.tables import tuning_table

    report = result.tuned.report
    out.print(tuning_table(report))
    tell(f"{report.checkpoint} → {result.output}: {report.method} ×{report.factor:g}, {report.target_length} tokens")
    tables = "table agrees" if result.proved == 1 else "tables agree"
    tell(
        f"proved: {result.proved} live rotary {tables} with the mathematics; stock transformers gives the tuned "
        "model's logits"
    )
    lengths = ",".join(map(str, sorted({report.original_max_position_embeddings, report.target_length})))
    tell(
        "The documents above chose the result. Measure it on others: "
        f"ropecli eval-ppl {result.output} --baseline {report.checkpoint} --data HELD_OUT --protocol tail --lengths "
        f"{lengths}"
    )
