"""What a tuning gave, for the terminal: before and after, on the judge's documents."""

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ropecli.report.tuned.cells import states_of
from ropecli.report.wording import clean
from ropecli.tune.record import TRAINING, TuneReport


def tuning_table(report: TuneReport) -> Group:
    """A line each: the model as pretrained, by the plain method, by the best constants, and as it was tuned."""
    cells = states_of(report)
    shown = [index for index, head in enumerate(cells.heads) if head != "documents"]  # the title has it
    table = Table()
    for index in shown:
        table.add_column(cells.heads[index], justify="right" if index else "left")
    for row in cells.rows:
        table.add_row(*(Text(row[index]) for index in shown))
    title = (
        f"{clean(report.checkpoint)}: the last {report.settings['targets']} tokens of the {report.score.documents} "
        f"documents of {clean(report.source)} that the tuning was judged by"
    )
    return Group(Text(title), table, *map(Text, _notes(report)))


def _notes(report: TuneReport) -> list[str]:
    if report.level not in TRAINING:
        return []
    if not report.step:
        return [f"{report.level} found nothing better than the best constants: these alone are written."]
    return [f"Rounded to the dtype of the weights' files, logits move by {report.rounding:.1g} of the largest."]
