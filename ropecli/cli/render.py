"""Prints what the commands return, in the order of `ropecli --help`."""

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropecli import demo
from ropecli.checkpoint.files import CONFIG, TOKENIZER_CONFIG
from ropecli.cli.terminal import err, out, print_json, show_changes, show_tables, tell, warn
from ropecli.commands.methods import example, written_as
from ropecli.errors import quoted
from ropecli.messages import duration, marked, size
from ropecli.table import Table

if TYPE_CHECKING:
    from ropecli.commands.check_served import ServedCheck
    from ropecli.commands.env import Environment
    from ropecli.commands.extend import Extended
    from ropecli.commands.finetune import FinetuneResult
    from ropecli.commands.inspect import Inspection
    from ropecli.commands.measure import Reports
    from ropecli.commands.merge import MergeResult
    from ropecli.commands.methods import MethodList
    from ropecli.commands.patch import PatchResult
    from ropecli.commands.plan import TrainingPlan
    from ropecli.commands.push import PushResult
    from ropecli.commands.recipe import RecipeList
    from ropecli.commands.report import Page
    from ropecli.commands.revert import RevertResult
    from ropecli.commands.theory import Theory
    from ropecli.engines.engine_export import Export
    from ropecli.scaling.method import Parameter, ScalingMethod


def show_inspection(inspection: "Inspection") -> None:
    """Lengths, problems and the next command; geometry, layers and cache if verbose, or beside another checkpoint."""
    several = len(inspection.reports) > 1
    if several or out.verbose:
        from ropecli.reporting.rope_tables import inspection_table

        show_tables([inspection_table(inspection.reports, inspection.differences)])
        tell("")
    for report in inspection.reports:
        name = report["checkpoint"]
        scaling = f", scaled by {report['method']} ×{report['factor']:g}" * (report["method"] != "none")
        tell(
            f"{name} ({report['model_type']}) reads {report['context_length']:,} tokens; pretrained on "
            f"{report['pretraining_length']:,} (source: {report['pretraining_length_source']}){scaling}."
        )
        if several or out.verbose:
            _show_layers(report)
        if report["reading"] and report["reading"]["verdict"] != "misread":  # which is a finding
            tell(report["reading"]["message"])
        where, found = f" in {name}" * several, len(report["findings"])
        tell(f"{found} problem{'s'[: found != 1]} found{where}:" if found else f"No problems found{where}.")
        _show_findings(report["findings"])
        for sentence in report["limits"]:
            tell(sentence)
        if extension := report["makers_extension"]:
            by = f"{extension['method']} ×{extension['factor']:g} to {extension['context_length']:,} tokens"
            by += ", with training" * extension["needs_training"]
            tell(f"The makers extend it by {by} ({extension['source']}):\n  {extension['command']}")
    if not (several or out.verbose):
        tell("Rotary geometry, layers and KV cache: -v.")


def _show_layers(report: dict[str, Any]) -> None:
    for kind in report["layers"]:
        seen = f", {kind['window']} tokens" if kind["window"] else ""
        rope = f"rotary, base {kind['rope_theta']:,.10g}" if "rope_theta" in kind else "rotary"
        scaled = f", {kind['method']} ×{kind['factor']:g}" if kind.get("method", "none") != "none" else ""
        positions = {True: f"{rope}{scaled}", False: "no positions", None: "positions unknown"}[kind["rotates"]]
        tell(f"  layers: {kind['count']} {kind['attention'] or 'unknown'}{seen}; {positions}")
    if report["kv_cache_bytes"]:
        each, later = report["kv_cache_bytes_per_token"], report["kv_cache_bytes_per_token_beyond_windows"]
        beyond = f" ({size(later) if later else 'none'} beyond the windows)" if later != each else ""
        total = f"{size(report['kv_cache_bytes'])} at {report['context_length']} tokens"
        tell(f"  KV cache in bfloat16: {size(each)} per token{beyond}, {total}")


def _show_findings(findings: Sequence[dict[str, Any]], stream: Any = out) -> None:
    """Problems that `inspect` finds, and what fixes them. stream: `err` beside another result."""
    for fix in dict.fromkeys(finding["fix"] for finding in findings):
        for finding in findings:
            if finding["fix"] == fix:
                stream.print(finding["message"], label=f"{finding['rule']}:", colour="yellow")
        if fix:
            tell(f"  fix: {fix}", stream)


def show_methods(listed: "MethodList") -> None:
    if not listed.single:
        tell(
            "`ropecli extend` measures which to take. By hand, start with yarn and a factor of 1.5 to 2 times what the "
            "length needs; with ropecli's attention, dual-chunk and rerope.\n"
        )
        show_tables([_method_overview(listed.methods)])
        return
    (method,) = listed.methods
    show_tables(_method_details(method))
    for paragraph in method.description.split("\n\n"):
        tell("\n" + " ".join(paragraph.split("\n")))
    tell(f"\n{example(method)}")


def _method_overview(methods: "Iterable[ScalingMethod]") -> Table:
    rows: list[list[str]] = []
    sections = set()
    for method in methods:
        sections.add(len(rows))
        defaults = {parameter.name: _default(parameter) for parameter in method.parameters}
        parameters = ", ".join(f"{name}={default}" if default else name for name, default in defaults.items())
        rows.append([method.name, method.summary, written_as(method)])
        rows += [["", text, ""] for text in (parameters, f"training: {method.training}", method.source) if text]
    heads = ["method", "summary; parameters; training; source", "written as"]
    return Table("", heads, rows, names=len(heads), sections=frozenset(sections))


def _method_details(method: "ScalingMethod") -> list[Table]:
    """One method: facts and parameters."""
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
    tables = [Table(method.name, ["", ""], [fact for fact in facts if fact[1]], names=2)]
    if method.parameters:
        rows = [
            [parameter.name, parameter.kind, "required" if parameter.required else _default(parameter) or "not set"]
            for parameter in method.parameters
        ]
        tables.append(Table("", ["parameter", "type", "default"], rows, names=3))
    return tables


def _default(parameter: "Parameter") -> str:
    """The default as text, or an empty string."""
    if isinstance(parameter.default, bool):
        return str(parameter.default).lower()
    return "" if parameter.default is None else f"{parameter.default:g}"


def show_theory(theory: "Theory") -> None:
    from ropecli.reporting.rope_tables import theory_tables

    show_tables(theory_tables(theory.report))
    if theory.plot:
        tell(f"plot: {theory.plot}")


_COUNTS = {"parameters": "total", "trained": "trained", "active per token": "active_per_token"}


def show_plan(plan: "TrainingPlan") -> None:
    from ropecli.training.memory_plan.hardware import TRAINING_ENGINES

    report = plan.report
    counts, memory, host = report["parameters"], report["memory"], report["host_memory"]
    groups = [
        [(name, f"{counts[key]:,}") for name, key in _COUNTS.items()],
        [
            *((name, size(count)) for name, count in memory.items() if name not in ("total", "host")),
            ("on each GPU", size(memory["total"])),
        ],
        [
            ("main memory of a machine", size(host["needed"])),
        ],
        [("KV cache of inference, bfloat16", size(report["kv_cache"]))] if report["kv_cache"] else [],
        [
            ("tokens per step", f"{report['tokens_per_step']:,}"),
            (f"tokens in {report['steps']} steps", f"{report['tokens']:,}"),
            ("FLOPs per step", f"{report['flops_per_step']:.3g}"),
            (f"time per step, MFU {report['mfu']:g}", duration(report["seconds_per_step"])),
            ("total time", duration(report["seconds"])),
        ],
    ]
    hardware = f"{report['gpus']} × {size(report['gpu_memory'])}"
    staged = f", stage {report['stage']} of {report['stages']}," if report["stages"] > 1 else ""
    title = f"{report['checkpoint']} at {report['length']:,} tokens{staged} on {hardware}"
    sections = frozenset(accumulate(map(len, groups)))
    ways = []
    for row in report["options"]:
        change = row["refused"] or ", ".join(row["settings"]) or "unchanged"
        gpu = "" if row["bytes"] is None else size(row["bytes"])
        machine = "" if row["host_memory"] is None else size(row["host_memory"])
        fits = "yes" if row["fits"] else "no"
        ways.append([row["adapter"], TRAINING_ENGINES[row["engine"]], change, gpu, machine, fits])
    heads = ["adapter", "engine", "settings", "GPU", "machine", "fits"]
    show_tables([Table(title, ["", ""], list(chain(*groups)), sections=sections), Table("", heads, ways, names=3)])
    tell(f"{report['setting']}:\n{report['command']}")
    if staged:
        tell(
            f"The figures are of stage {report['stage']}, the longest. The command runs all {report['stages']} stages."
        )
    _show_findings(report["findings"], err)


def show_patch(result: "PatchResult") -> None:
    from ropecli.checkpoint.advice import without_headroom

    plan, output = result.plan, result.output
    arrow = "" if output is None else f" → {output}"
    tell(f"{plan.source.name}{arrow}: {plan.spec.method} ×{plan.spec.factor:g}, {plan.positions.context_length} tokens")
    if output is None:
        show_changes(CONFIG, plan.changes)
    tables = f"{result.proved} rotary table{'s match' if result.proved > 1 else ' matches'} the formulas"
    tell(f"Proved: in stock transformers, {tables}." if result.proved else "Not proved (--no-verify).")
    if plan.remapping:
        tell("Proved: on a small model of this architecture, the attention computes what transformers' own does.")
    if note := without_headroom(plan):
        tell(f"note: {note}", err)
    if output is not None:
        _suggest_measuring(output, plan.source.name)


def show_reverted(result: "RevertResult") -> None:
    if result.output is not None:
        tell(f"{result.reversal.source.name} → {result.output}: all patches undone")
        return
    show_changes(CONFIG, result.reversal.changes)
    if result.reversal.tokenizer_changes:
        show_changes(TOKENIZER_CONFIG, result.reversal.tokenizer_changes)


def _suggest_measuring(output: Path, base: str, *options: str) -> None:
    """The next sensible command, ready to paste."""
    data = "demo" if base == demo.NAME else "YOUR_TEXTS"
    tell("Next: " + quoted("ropecli", "eval-ppl", output, "--baseline", base, "--data", data, *options))


def show_measured(result: "Reports") -> None:
    from ropecli.reporting.report_tables import measured_tables

    show_tables(measured_tables(result.reports, verbose=out.verbose))
    if result.plot:
        tell(f"plot: {result.plot}")


def show_served(check: "ServedCheck") -> None:
    """The table of readings, the verdict, and what to do about it."""
    place = f"{check.model} at {check.url}, compared by the log-probabilities of "
    place += "the prompt" if check.answers.gives_losses else "the next token after several prompts"
    heads = ["reading", "within", "beyond", "share (95% interval)"]
    rows = [
        [
            comparison.label,
            *("" if value is None else f"{value:.2g}" for value in (comparison.within, comparison.beyond)),
            f"{comparison.share:.2f} ({comparison.low:.2f} to {comparison.high:.2f})" if comparison.share else "",
        ]
        for comparison in check.verdict.comparisons
    ]
    notes = [
        "within, beyond the pretraining length: mean difference of the server to transformers, nats",
        "share: 0 where the server computes as the checkpoint, 1 where it computes as this reading",
        f"after a single token, where no scaling matters: {check.verdict.after_single:.2g} nats",
    ]
    show_tables([Table(place, heads, rows, notes)])
    tell(f"{check.verdict.verdict}: {check.verdict.reason}")
    known, compared = check.max_length, check.answers.accepted
    tell(f"Accepts {known} tokens; compared up to {compared}." if known else f"Accepts at least {compared} tokens.")
    if check.fix:
        tell(f"To serve the checkpoint's scaling: {check.fix}")
    _show_findings(check.as_json()["findings"], err)
    for note in check.notes:
        tell(f"note: {note}", err)


def show_page(page: "Page") -> None:
    tell(f"page: {page.path}")


def show_extended(result: "Extended") -> None:
    from ropecli.reporting.extended import candidates_table, next_steps, verdict

    record = result.as_json()
    if not record["measured"]:
        tell(f"Candidates: {', '.join(result.candidates)}. Measuring takes some {duration(result.seconds)}.")
        tell("For less time use --budget, fewer --methods or a smaller --length.")
        return
    for sentence in verdict(record):
        tell(sentence)
    show_tables([candidates_table(record)])
    if result.output:
        tell(f"Wrote {result.output}, proved. Page: {result.page}")
    elif result.page:
        tell(f"{result.checkpoint} reads it as it is: no checkpoint is written. Page: {result.page}")
    for sentence, command in next_steps(record):
        tell(sentence + (":" if command else ".") if sentence else "")
        if command:
            tell(f"  {command}")


def show_finetuned(result: "FinetuneResult") -> None:
    for sentence in result.stages:
        tell(sentence)
    for spans in result.sequences:
        tell(marked(spans))
    if result.output is None:
        return
    done = f"{result.steps} step{'s'[: result.steps > 1]}"
    if result.first_loss is not None and result.last_loss is not None:
        if result.new_steps < result.steps:
            done += f"; since --resume {result.new_steps}"
        done += f", {result.tokens:,} tokens in {duration(result.seconds)}"
        done += f", loss {result.first_loss:.3f} → {result.last_loss:.3f}"
    tell(f"{result.checkpoint} → {result.output}: {done}")
    if (result.output / CONFIG).is_file():
        _suggest_measuring(result.output, result.checkpoint, "--protocol", "tail")


def show_recipes(listed: "RecipeList") -> None:
    if listed.schema is not None:
        print_json(listed.schema)
    elif listed.path:
        tell("\n".join(str(file.path) for file in listed.recipes))
    elif listed.single:
        tell(listed.recipes[0].text.rstrip("\n"))
    else:
        rows = [[file.name, file.kind, file.summary] for file in listed.recipes]
        show_tables([Table("", ["name", "kind", "summary"], rows, names=3)])


def show_environment(environment: "Environment") -> None:
    show_tables([Table("", ["name", "value"], [[*row] for row in environment.values.items()], names=2)])


def show_merged(result: "MergeResult") -> None:
    tell(f"{result.adapter} + {result.base.name} → {result.output}: {result.matrices} matrices")


def show_export(export: "Export") -> None:
    """The command alone on standard output, to be pasted; or its config file, to be redirected."""
    unwritten = export.file_text and not export.written
    tell(export.file_text.rstrip() if unwritten else export.command)
    _show_findings(export.as_json()["findings"], err)
    for sentence in export.cannot:
        warn(sentence)
    if unwritten:
        tell(f"Save this as {export.file_name} (or use --output), then run: {export.command}", err)
    for sentence in export.notes:
        tell(f"note: {sentence}", err)


def show_pushed(result: "PushResult") -> None:
    total = f"{len(result.files)} files ({size(sum(result.files.values()))})"
    if result.commit is not None:
        tell(f"{result.folder} → {result.url}, {'private' if result.private else 'public'}: {total}")
        return
    for name, bytes_ in result.files.items():
        tell(f"{size(bytes_):>9}  {name}")
    tell(f"{total} for {result.repo}")
    if out.verbose:
        tell(result.card)
