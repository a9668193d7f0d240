"""Prints what the commands return; inspect, methods and plan have files of their own."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropecli import demo
from ropecli.cli.terminal import err, out, print_json, show_changes, show_tables, tell, warn
from ropecli.errors import quoted
from ropecli.table import Table

if TYPE_CHECKING:
    from ropecli.commands.finetune import FinetuneResult
    from ropecli.commands.merge import MergeResult
    from ropecli.commands.patch import PatchResult, RevertResult
    from ropecli.commands.push import PushResult
    from ropecli.commands.recipe import RecipeList
    from ropecli.commands.report import DrawnFile
    from ropecli.commands.theory import Theory
    from ropecli.commands.tune import TunedCheckpoint
    from ropecli.engines.engine_export import Export
    from ropecli.reporting.outputs import Reports


def show_patch(result: "PatchResult | RevertResult") -> None:
    from ropecli.commands.patch import RevertResult

    if isinstance(result, RevertResult):
        if result.output is not None:
            tell(f"{result.reversal.source.name} → {result.output}: all patches undone")
            return
        show_changes("config.json", result.reversal.changes)
        if result.reversal.tokenizer_changes:
            show_changes("tokenizer_config.json", result.reversal.tokenizer_changes)
        return
    plan, output = result.plan, result.output
    arrow = "" if output is None else f" → {output}"
    tell(f"{plan.source.name}{arrow}: {plan.spec.method} ×{plan.spec.factor:g}, {plan.target_length} tokens")
    if output is None:
        show_changes("config.json", plan.changes)
        return
    tell(f"Proved: {_tables(result.proved)}." if result.proved else "Not proved (--no-verify).")
    if plan.remaps:
        tell("Proved: on a small model of this architecture, the attention computes what transformers' own does.")
    _suggest_measuring(output, plan.source.name)


def _tables(proved: int) -> str:
    tables = "rotary table matches" if proved == 1 else "rotary tables match"
    return f"in stock transformers, {proved} {tables} the formulas"


def _suggest_measuring(output: Path, base: str, *options: str) -> None:
    """The next sensible command, ready to paste."""
    data = "demo" if base == demo.NAME else "YOUR_TEXTS"
    tell("Next: " + quoted("ropecli", "eval-ppl", output, "--baseline", base, "--data", data, *options))


def show_measured(result: Any) -> None:
    """A report, or the `reports` of a result: the tables of each, then a comparison of several."""
    from ropecli.reporting.report_tables import comparison_tables, report_tables

    reports = getattr(result, "reports", [result])
    tables = [table for report in reports for table in report_tables(report, verbose=out.verbose)]
    show_tables([*tables, *(comparison_tables(reports, verbose=out.verbose) if len(reports) > 1 else [])])


def show_comparison(comparison: "Reports") -> None:
    from ropecli.reporting.report_tables import comparison_tables

    show_tables(comparison_tables(comparison.reports, verbose=out.verbose))
    if comparison.plot:
        tell(f"plot: {comparison.plot}")


def show_theory(theory: "Theory") -> None:
    from ropecli.reporting.theory_tables import theory_tables

    show_tables(theory_tables(theory.report))


def show_file(drawn: "DrawnFile") -> None:
    tell(f"{drawn.kind}: {drawn.path}")


def show_finetuned(result: "FinetuneResult") -> None:
    from ropecli.reporting.wording import duration

    for sentence in result.stages:
        tell(sentence)
    if result.output is None:
        return
    done = f"{result.steps} step{'s'[: result.steps > 1]}"
    if result.first_loss is not None and result.last_loss is not None:
        done += f", {result.tokens:,} tokens in {duration(result.seconds)}"
        done += f", loss {result.first_loss:.3f} → {result.last_loss:.3f}"
    tell(f"{result.checkpoint} → {result.output}: {done}")
    if (result.output / "config.json").is_file():
        _suggest_measuring(result.output, result.checkpoint, "--protocol", "tail")


def show_recipes(listed: "RecipeList") -> None:
    out.quiet = False  # a cluster may set RANK in every node's shell, and each needs the path
    if listed.schema is not None:
        print_json(listed.schema)
    elif listed.path:
        tell("\n".join(str(file.path) for file in listed.recipes))
    elif listed.one:
        tell(listed.recipes[0].text.rstrip("\n"))
    else:
        rows = [[file.name, file.kind, file.summary] for file in listed.recipes]
        show_tables([Table("", ["name", "kind", "summary"], rows, names=3)])


def show_tuned(result: "TunedCheckpoint") -> None:
    from ropecli.reporting.tuning_runs import tuning_table

    report = result.tuned.report
    show_tables([tuning_table(report)])
    tell(f"{report.checkpoint} → {result.output}: {report.method} ×{report.factor:g}, {report.target_length} tokens")
    tell(f"Proved: {_tables(result.proved)}, and the logits are those of the tuned model.")
    tell("The scores above are of the documents that chose the result. Measure on others:")
    lengths = ",".join(map(str, sorted({report.original_max_position_embeddings, report.target_length})))
    _suggest_measuring(result.output, report.checkpoint, "--protocol", "tail", "--lengths", lengths)


def show_merged(result: "MergeResult") -> None:
    tell(f"{result.adapter} + {result.base.name} → {result.output}: {result.matrices} matrices")


def show_export(export: "Export") -> None:
    """The command alone on standard output, to be pasted; or its config file, to be redirected."""
    unwritten = export.file_text and not export.written
    tell(export.file_text.rstrip() if unwritten else export.command)
    for sentence in export.cannot:
        warn(sentence)
    notes = [f"note: {sentence}" for sentence in export.notes]
    save = f"Save this as {export.file_name} (or use --output), then run: {export.command}"
    for sentence in [*notes, save] if unwritten else notes:
        err.print(sentence, markup=False, soft_wrap=True)


def show_pushed(result: "PushResult") -> None:
    from ropecli.reporting.wording import size

    if result.upload is None:
        for file in result.files:
            tell(f"{size(file.size):>9}  {file.name}")
        tell(f"{size(sum(file.size for file in result.files)):>9}  in {len(result.files)} files for {result.repo}")
        tell(f"card: {result.card}")
        return
    sizes = {status: [file.size for file in result.files if file.status == status] for status in _PUSHED}
    done = [f"{len(of)} {_PUSHED[status]} ({size(sum(of))})" for status, of in sizes.items() if of]
    tell(f"{result.folder} → {result.url}, {'private' if result.upload.private else 'public'}: {', '.join(done)}")


_PUSHED = {"uploaded": "uploaded", "copied": "copied there from the base model", "unchanged": "there already"}
