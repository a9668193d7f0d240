"""Makes the model card that `ropecli push` uploads: the README.md of the folder, with metadata and measurements.

The numbers come from reports of this checkpoint, and the licence from the folder's own README.md.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from ropecli.checkpoint.card import (
    NEEDS_ROPECLI,
    README,
    code,
    describe_changes,
    hub_link,
    public_name,
    read_run,
    rope_table,
    split_metadata,
    table,
    text,
    trained,
    with_section,
    without_section,
)
from ropecli.checkpoint.files import TUNING, is_own_file, read_text
from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.provenance import entry, read_record
from ropecli.checkpoint.state import CheckpointState
from ropecli.checkpoint.upload import Source
from ropecli.engines.engine_export import export_checkpoint
from ropecli.errors import CheckpointError, DataError, PatchError, reason_of
from ropecli.evaluation.report import EvalReport, RetrievalReport, RulerReport
from ropecli.reporting import cells
from ropecli.reporting.report_files import Report, read_reports
from ropecli.reporting.wording import HEADLINES_NOTE, headline_sentence, protocol_name, ruler_mode, ruler_sentences
from ropecli.scaling.scale import varies_with_length
from ropecli.yaml12 import read_yaml

_ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "llama.cpp": "llama.cpp", "mlx": "mlx-lm"}
_LARGEST_README = 2**21
"""Bytes. PyYAML parses 150 KB per second."""
_ROWS = 20
"""Maximum rows of a table."""
_OF_ANOTHER = ("base_model", "base_model_relation", "model-index", "model_name", "new_version")
"""Metadata of the copied README.md that are not true of the changed checkpoint."""
Measured = EvalReport | RetrievalReport | RulerReport


@dataclass(frozen=True)
class ModelCard:
    """content: the whole README.md. license: of its metadata, None if unknown."""

    content: str
    license: str | None


def read_measurements(paths: Sequence[Path], checkpoint: Checkpoint) -> list[list[Measured]]:
    """Read the reports of each file. Raises DataError for a file without a measurement of this checkpoint."""
    return [_measurements(path, read_reports([path]), checkpoint) for path in paths]


def _measurements(path: Path, reports: list[Report], checkpoint: Checkpoint) -> list[Measured]:
    measured = [report for report in reports if isinstance(report, Measured)]
    if not measured:
        raise DataError(
            f"{path} is of `ropecli tune`, whose scores chose the result. Measure {checkpoint.name} on other data, "
            "such as with ropecli eval-ppl."
        )
    if not any(_is_of(report, checkpoint) for report in measured):
        one = measured[0]
        what = f"{one.checkpoint} with {one.label} in memory" if one.in_memory else one.checkpoint
        raise DataError(
            f"{path} is a report of {what}, not of {checkpoint.name} as it is now (digest {one.digest[:19]}, expected "
            f"{checkpoint.digest()[:19]}). Measure {checkpoint.name} again."
        )
    return measured


def _is_of(report: Measured, checkpoint: Checkpoint) -> bool:
    return not report.in_memory and checkpoint.matches(report.digest)


def make_card(
    state: CheckpointState, repo: str, measurements: Sequence[Sequence[Measured]] = (), base: Source | None = None
) -> ModelCard:
    """Make the card of a checkpoint folder for the Hub repository `repo`.

    measurements: of each file, see read_measurements. base: the base model, None if unknown. Raises CheckpointError for
    a README.md that is too large, not UTF-8, or whose metadata are not a YAML mapping.
    """
    from huggingface_hub import ModelCardData

    path = state.checkpoint.folder / README
    try:
        readme = without_section(read_text(path, _LARGEST_README).encode()) if path.is_file() else b""
        metadata = _metadata(readme, state, base)
        data = ModelCardData(**metadata)
    except (OSError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot become the model card: {reason_of(error)}. Correct it.") from error
    _, rest = split_metadata(readme)
    section = "\n\n".join(_parts(state, repo, measurements, base, has_more=bool(rest.strip())))
    content = with_section(f"---\n{data.to_yaml()}\n---\n".encode() + rest, section)
    return ModelCard(content.decode(), metadata.get("license"))


def _metadata(readme: bytes, state: CheckpointState, base: Source | None) -> dict[str, Any]:
    """Raises TypeError, ValueError."""
    found = read_yaml(split_metadata(readme)[0]) or {}
    if not isinstance(found, dict):
        raise ValueError(f"its metadata are a {type(found).__name__}; expected a mapping")
    kept = {key: value for key, value in found.items() if key not in _OF_ANOTHER}
    tags = kept.get("tags") or []
    own = ["long-context", "rope", *state.main.spec.method.name.split("+")]
    kept["tags"] = list(dict.fromkeys([*([tags] if isinstance(tags, str) else tags), *own, "ropecli"]))
    kept["library_name"] = "transformers"
    if base:
        kept["base_model"] = base.repo
    if base and trained(read_record(state.checkpoint.folder)):
        kept["base_model_relation"] = "finetune"  # the Hub has no relation for another config with the same weights
    return kept


def _parts(
    state: CheckpointState,
    repo: str,
    measurements: Sequence[Sequence[Measured]],
    base: Source | None,
    *,
    has_more: bool,
) -> Iterator[str]:
    """The Markdown of the section, in order."""
    yield f"# {text(repo.rpartition('/')[2])}"
    if base:
        yield f"Base model: {hub_link(*base)}."
    yield from describe_changes(state)
    yield from _recipe(state.checkpoint.folder)
    yield "## Rotary embeddings"
    yield rope_table(state)
    yield "## Measured"
    yield from (part for reports in measurements for part in _of_file(reports, state.checkpoint, repo))
    if not measurements:
        yield "No measurement was given."
    yield "## Use with transformers"
    yield from _loading(state, repo)
    yield from _serving(state, repo)
    yield "## Limits"
    yield "\n".join(f"- {limit}" for limit in _limits(state, measurements))
    if has_more:
        yield "## Before these changes"
        yield "The text below describes the base model."


def _recipe(folder: Path) -> Iterator[str]:
    """The commands and settings of `tune` and `finetune`, folded."""
    # run.yaml has all stages, ropecli.yaml only the last one
    recipe = read_run(folder).get("recipe") or entry(read_record(folder), "finetuned").get("recipe")
    if recipe:
        shown = yaml.safe_dump(_without_paths(recipe), sort_keys=False, allow_unicode=True)
        yield _folded("Recipe, for `ropecli finetune --recipe`", shown, "yaml")
    if is_own_file(folder / TUNING):
        (report,) = read_reports([folder / TUNING])
        yield _folded("Command of `ropecli tune`", _command(report.command), "")


def _without_paths(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_paths(one) for key, one in value.items() if one is not None}
    if isinstance(value, list):
        return [_without_paths(one) for one in value]
    return public_name(value) if isinstance(value, str) else value


def _command(words: Sequence[str]) -> str:
    return " ".join(shlex.join(map(public_name, words)).split()) or "called from Python"


def _folded(title: str, body: str, language: str) -> str:
    return f"<details><summary>{title}</summary>\n\n```{language}\n{body.rstrip()}\n```\n\n</details>"


def _of_file(reports: Sequence[Measured], checkpoint: Checkpoint, repo: str) -> Iterator[str]:
    """The tables of one file, the command, and the versions."""
    own = [report for report in reports if _is_of(report, checkpoint)]
    named = [_named(report, repo if _is_of(report, checkpoint) else None) for report in reports]
    perplexities = [report for report in named if isinstance(report, EvalReport)]
    if len(perplexities) > 1 and len({report.protocol for report in perplexities}) == 1:
        yield from _compared(perplexities)
    for report in own:
        yield from _table_of(report)
    one = own[0]
    versions = ", ".join(f"{name} {version}" for name, version in one.environment.items())
    yield f"Data: {code(public_name(one.source))}; {text(one.dtype)} on {text(one.device)}; {text(versions)}."
    yield f"```\n{_command(one.command)}\n```"


def _named(report: Measured, name: str | None) -> Measured:
    """The report under the name of the repository, or without the path of a local folder."""
    named = replace(report, checkpoint=name or public_name(report.checkpoint), source=public_name(report.source))
    if isinstance(named, EvalReport) and (base := named.baseline):
        return replace(named, baseline=replace(base, checkpoint=public_name(base.checkpoint)))
    return named


def _compared(reports: Sequence[EvalReport]) -> Iterator[str]:
    compared = cells.compare(reports)
    heads = [*compared.heads, *(str(length) for length in compared.lengths)]
    rows = [[*line.names, *(number for number, _ in line.cells)] for line in compared.lines]
    yield f"### {text(compared.title)}"
    yield _markdown(cells.TextTable(heads, rows))
    yield from map(text, (note for note in compared.notes if not note.startswith("bold")))


def _table_of(report: Measured) -> Iterator[str]:
    if isinstance(report, EvalReport):
        columns = ("length", "ppl", "baseline ppl", "95% interval", "tokens", "documents")
        yield f"### Perplexity by length, protocol {text(protocol_name(report))}"
        yield _markdown(cells.measured_rows(report).only(*columns))
        if report.baseline:
            yield f"Baseline: {code(public_name(report.baseline.checkpoint))}, {text(report.baseline.label)}."
        if report.headlines:
            sentences = [f"- {text(headline_sentence(headline))}" for headline in report.headlines]
            yield "\n".join(sentences) + f"\n\n{HEADLINES_NOTE}"
    elif isinstance(report, RetrievalReport):
        asked = "ranked among candidates" if report.mode == "rank" else "generated"
        yield f"### Keys found: {text(report.task)}, {asked}"
        yield _markdown(cells.length_summary(report).only("length", "found", "95% (Wilson)", "prompts"))
        yield f"Random guessing finds {100 * report.chance:.3g}%."
    else:
        yield f"### RULER in percent, {ruler_mode(report)}"
        yield _markdown(cells.ruler_scores(report))
        yield text(" ".join(ruler_sentences(report)))


def _markdown(found: cells.TextTable) -> str:
    rows = [list(map(text, row)) for row in found.rows]
    shown = table(list(map(text, found.heads)), rows[:_ROWS])
    return shown if len(rows) <= _ROWS else f"{shown}\n\n{len(rows) - _ROWS} more rows are in the report."


def _loading(state: CheckpointState, repo: str) -> Iterator[str]:
    names = state.checkpoint.config.get("architectures") or ["AutoModelForCausalLM"]
    cls = names[0] if isinstance(names, list) and re.fullmatch(r"\w+", str(names[0])) else "AutoModelForCausalLM"
    imports = ["import ropecli.attention"] if state.main.remapping else []
    imports.append(f"from transformers import AutoTokenizer, {cls}")
    lines = [
        f'model = {cls}.from_pretrained("{repo}", dtype="auto", device_map="auto")',
        f'tokenizer = AutoTokenizer.from_pretrained("{repo}")',
    ]
    yield "\n".join(["```python", *imports, "", *lines, "```"])
    if state.main.remapping:
        yield NEEDS_ROPECLI


def _serving(state: CheckpointState, repo: str) -> Iterator[str]:
    """A block for each engine that supports the checkpoint."""
    on_hub = replace(state.checkpoint, name=repo, commit="main")
    for engine, name in _ENGINES.items():
        try:
            found = export_checkpoint(on_hub, engine)
        except PatchError:
            continue
        yield f"## Serve with {name}"
        yield f"```\n{found.command}\n```"
        if notes := [f"- {text(note)}" for note in (*found.cannot, *found.notes)]:
            yield "\n".join(notes)


def _limits(state: CheckpointState, measurements: Sequence[Sequence[Measured]]) -> Iterator[str]:
    record, method = read_record(state.checkpoint.folder), state.main.spec.method
    if not trained(record):
        needs = {"needed": " This method needs training.", "advised": " Training is advised with this method."}
        yield f"The weights were not trained at the new context length.{needs.get(method.training, '')}"
    if varies_with_length(state.main):
        yield "The frequencies depend on the length: a KV cache that grows past the pretraining length is inexact."
    elif state.main.remapping:
        yield "Distance methods run only in transformers with ropecli; other engines would run standard attention."
    elif method.name != "none":
        yield "The scaling also applies to short inputs, where the base model can be better."
    kinds: Mapping[str, type] = {"perplexity": EvalReport, "key retrieval": RetrievalReport, "RULER": RulerReport}
    found = [report for reports in measurements for report in reports if _is_of(report, state.checkpoint)]
    if missing := [name for name, kind in kinds.items() if not any(isinstance(one, kind) for one in found)]:
        yield f"Not measured: {', '.join(missing)}, and short-context benchmarks."
    longest = max((_longest(report) for report in found), default=None)
    if longest and longest < state.context_length:
        yield f"Measured up to {longest:,} of {state.context_length:,} tokens."


def _longest(report: Measured) -> int:
    rows = report.rows if isinstance(report, EvalReport) else report.cells
    return max(row.length for row in rows)
