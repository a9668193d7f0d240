"""Makes the model card that `ropecli push` uploads: the README.md of the folder, with metadata and measurements.

The numbers come from reports of this checkpoint, and the licence from the folder's own README.md.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
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
    trained,
    with_section,
    without_section,
)
from ropecli.checkpoint.files import TUNING, is_own_file, read_file
from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.provenance import entry
from ropecli.checkpoint.state import CheckpointState
from ropecli.checkpoint.upload import Source
from ropecli.engines.engine_export import export_checkpoint
from ropecli.errors import CheckpointError, DataError, PatchError, reason_of
from ropecli.evaluation.report import Report
from ropecli.reporting.report_files import read_reports
from ropecli.reporting.report_tables import comparison_tables, report_tables
from ropecli.scaling.scale import varies_with_length
from ropecli.table import escaped, markdown
from ropecli.yaml12 import read_yaml

_ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "llama.cpp": "llama.cpp", "mlx": "mlx-lm"}
"""Bytes. PyYAML parses 150 KB per second."""
_OF_ANOTHER = ("base_model", "base_model_relation", "model-index", "model_name", "new_version")
"""Metadata of the copied README.md that are not true of the changed checkpoint."""
_KINDS = {"perplexity": ("perplexity",), "key retrieval": ("passkey", "needle"), "RULER": ("ruler",)}
"""By name, the kind or the tasks of a report."""


@dataclass(frozen=True)
class ModelCard:
    """content: the whole README.md. license: of its metadata, None if unknown."""

    content: str
    license: str | None


def read_measurements(paths: Sequence[Path], checkpoint: Checkpoint) -> list[list[Report]]:
    """Read the reports of each file. Raises DataError for a file without a measurement of this checkpoint."""
    files, name = [], checkpoint.name
    for path in paths:
        measured = [report for report in read_reports([path]) if isinstance(report, Report)]
        if not measured:
            raise DataError(
                f"{path} is of `ropecli tune`, whose scores chose the result. Measure {name} on other data, "
                "such as with ropecli eval-ppl."
            )
        if not any(_is_of(report, checkpoint) for report in measured):
            first = measured[0]
            what = f"{first.checkpoint} with {first.label} in memory" if first.in_memory else first.checkpoint
            raise DataError(
                f"{path} is a report of {what}, not of {name} as it is now (digest {first.digest[:19]}, expected "
                f"{checkpoint.digest()[:19]}). Measure {name} again."
            )
        files.append(measured)
    return files


def _is_of(report: Report, checkpoint: Checkpoint) -> bool:
    return not report.in_memory and checkpoint.matches(report.digest)


def make_card(
    state: CheckpointState, repo: str, measurements: Sequence[Sequence[Report]] = (), base: Source | None = None
) -> ModelCard:
    """Make the card of a checkpoint folder for the Hub repository `repo`.

    measurements: of each file, see read_measurements. base: the base model, None if unknown. Raises CheckpointError for
    a README.md whose metadata are not a YAML mapping, DataError for one that is not UTF-8.
    """
    from huggingface_hub import ModelCardData

    path = state.checkpoint.folder / README
    try:
        readme = without_section(read_file(path).encode()) if is_own_file(path) else b""
        metadata = _metadata(readme, state, base)
        data = ModelCardData(**metadata)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot become the model card: {reason_of(error)}. Correct it.") from error
    _, rest = split_metadata(readme)
    section = "\n\n".join(_parts(state, repo, measurements, base, has_more=bool(rest.strip())))
    content = with_section(f"---\n{data.to_yaml()}\n---\n".encode() + rest, section)
    return ModelCard(content.decode(), metadata.get("license"))


def _metadata(readme: bytes, state: CheckpointState, base: Source | None) -> dict[str, Any]:
    """Raises TypeError, ValueError."""
    metadata = read_yaml(split_metadata(readme)[0]) or {}
    if not isinstance(metadata, dict):
        raise ValueError(f"its metadata are a {type(metadata).__name__}; expected a mapping")
    kept = {key: value for key, value in metadata.items() if key not in _OF_ANOTHER}
    tags = kept.get("tags") or []
    keywords = ["long-context", "rope", *state.positions.main.spec.method.name.split("+")]
    kept["tags"] = list(dict.fromkeys([*([tags] if isinstance(tags, str) else tags), *keywords, "ropecli"]))
    kept["library_name"] = "transformers"
    if base:
        kept["base_model"] = base.repo
    if base and trained(state.checkpoint.record):
        kept["base_model_relation"] = "finetune"  # the Hub has no relation for another config with the same weights
    return kept


def _parts(
    state: CheckpointState, repo: str, measurements: Sequence[Sequence[Report]], base: Source | None, *, has_more: bool
) -> Iterator[str]:
    """The Markdown of the section, in order."""
    yield f"# {escaped(repo.rpartition('/')[2])}"
    if base:
        yield f"Base model: {hub_link(*base)}."
    yield from describe_changes(state)
    yield from _recipe(state.checkpoint)
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


def _recipe(checkpoint: Checkpoint) -> Iterator[str]:
    """The commands and settings of `tune` and `finetune`, folded."""
    # run.yaml has all stages, ropecli.yaml only the last one
    recipe = read_run(checkpoint.folder).get("recipe") or entry(checkpoint.record, "finetuned").get("recipe")
    if recipe:
        shown = yaml.safe_dump(_without_paths(recipe), sort_keys=False, allow_unicode=True)
        yield _folded("Recipe, for `ropecli finetune --recipe`", shown, "yaml")
    if is_own_file(tuning := checkpoint.folder / TUNING):
        (report,) = read_reports([tuning])
        yield _folded("Command of `ropecli tune`", _command(report.command), "")


def _without_paths(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_paths(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_paths(item) for item in value]
    return public_name(value) if isinstance(value, str) else value


def _command(words: Sequence[str]) -> str:
    return " ".join(shlex.join(map(public_name, words)).split()) or "called from Python"


def _folded(title: str, body: str, language: str) -> str:
    return f"<details><summary>{title}</summary>\n\n```{language}\n{body.rstrip()}\n```\n\n</details>"


def _of_file(reports: Sequence[Report], checkpoint: Checkpoint, repo: str) -> Iterator[str]:
    """The tables of one file, the command, and the versions."""
    of_checkpoint = [_named(report, repo) for report in reports if _is_of(report, checkpoint)]
    if len(reports) > 1:
        named = [_named(report, repo if _is_of(report, checkpoint) else None) for report in reports]
        yield from map(markdown, comparison_tables(named, verbose=False))
    for report in of_checkpoint:
        yield from map(markdown, report_tables(report, verbose=False))
    first = of_checkpoint[0]
    versions = ", ".join(f"{name} {version}" for name, version in first.environment.items())
    yield f"Data: {code(first.source)}; {escaped(first.dtype)} on {escaped(first.device)}; {escaped(versions)}."
    yield f"```\n{_command(first.command)}\n```"


def _named(report: Report, name: str | None = None) -> Report:
    """The report under the name of the repository, or without the path of a local folder."""
    base = report.baseline and _named(report.baseline)
    name, source = name or public_name(report.checkpoint), public_name(report.source)
    return replace(report, checkpoint=name, source=source, baseline=base)


def _loading(state: CheckpointState, repo: str) -> Iterator[str]:
    names = state.checkpoint.config.get("architectures") or ["AutoModelForCausalLM"]
    cls = names[0] if isinstance(names, list) and re.fullmatch(r"\w+", str(names[0])) else "AutoModelForCausalLM"
    imports = ["import ropecli.attention"] if state.positions.main.remapping else []
    imports.append(f"from transformers import AutoTokenizer, {cls}")
    lines = [
        f'model = {cls}.from_pretrained("{repo}", dtype="auto", device_map="auto")',
        f'tokenizer = AutoTokenizer.from_pretrained("{repo}")',
    ]
    yield "\n".join(["```python", *imports, "", *lines, "```"])
    if state.positions.main.remapping:
        yield NEEDS_ROPECLI


def _serving(state: CheckpointState, repo: str) -> Iterator[str]:
    """A block for each engine that supports the checkpoint."""
    on_hub = replace(state.checkpoint, name=repo, commit="main")
    for engine, name in _ENGINES.items():
        try:
            export = export_checkpoint(on_hub, engine)
        except PatchError:
            continue
        yield f"## Serve with {name}"
        yield f"```\n{export.command}\n```"
        problems = [finding.message for finding in export.findings]
        if notes := [f"- {escaped(note)}" for note in (*export.cannot, *problems, *export.notes)]:
            yield "\n".join(notes)


def _limits(state: CheckpointState, measurements: Sequence[Sequence[Report]]) -> Iterator[str]:
    record, method = state.checkpoint.record, state.positions.main.spec.method
    if not trained(record):
        needs = {"needed": " This method needs training.", "advised": " Training is advised with this method."}
        yield f"The weights were not trained at the new context length.{needs.get(method.training, '')}"
    if varies_with_length(state.positions.main):
        yield "The frequencies depend on the length: a KV cache that grows past the pretraining length is inexact."
    elif state.positions.main.remapping:
        yield "Distance methods run only in transformers with ropecli; other engines would run standard attention."
    elif method.name != "none":
        yield "The scaling also applies to short inputs, where the base model can be better."
    reports = [report for of_file in measurements for report in of_file if _is_of(report, state.checkpoint)]
    measured = {name for report in reports for name in (report.kind, report.task)}
    if missing := [name for name, tasks in _KINDS.items() if measured.isdisjoint(tasks)]:
        yield f"Not measured: {', '.join(missing)}, and short-context benchmarks."
    longest = max((report.lengths[-1] for report in reports), default=None)
    if longest and longest < state.positions.context_length:
        yield f"Measured up to {longest:,} of {state.positions.context_length:,} tokens."
