"""Makes the model card that `ropecli push` uploads: the README.md of the folder, with metadata and a section.

The section says what was done, from ropecli.yaml, what was measured, from reports of this checkpoint, and how to load
it. The licence is the one in the folder's own README.md.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ropecli.checkpoint.files import README, STAGES, read_file
from ropecli.checkpoint.identity import identity_of
from ropecli.checkpoint.inspection import inspect_checkpoint
from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.state import CheckpointState
from ropecli.errors import CheckpointError, DataError, reason_of
from ropecli.evaluation.report import Report
from ropecli.names import HUB_ID
from ropecli.reporting.report_files import read_reports
from ropecli.reporting.report_tables import measured_tables
from ropecli.reporting.rope_tables import inspection_table
from ropecli.scaling.registry import find_method
from ropecli.scaling.spec import label_of
from ropecli.table import LONGEST_TEXT, clean, escaped, markdown
from ropecli.yaml12 import read_yaml

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

BEGIN, _END = "<!-- ropecli:begin -->", "<!-- ropecli:end -->"
"""Mark the section, so that the next push of a downloaded card replaces it."""
_DROPPED_METADATA = ("base_model", "base_model_relation", "model-index", "model_name", "new_version")
"""Metadata of the copied README.md that are not true of the changed checkpoint."""


def read_measurements(paths: Sequence[Path], checkpoint: Checkpoint) -> list[list[Report]]:
    """Read the reports of each file. Raises DataError for a file without a measurement of this checkpoint."""
    files, name = [], checkpoint.name
    for path in paths:
        measured = read_reports([path])
        if not any(_is_of(report, checkpoint) for report in measured):
            names = dict.fromkeys(report.checkpoint + ", patched in memory" * report.in_memory for report in measured)
            raise DataError(
                f"{path} has no measurement of {name} as it is now (digest {checkpoint.digest[:19]}): it is of "
                f"{' and '.join(names)}. Measure {name}, such as with ropecli eval-ppl."
            )
        files.append(measured)
    return files


def _is_of(report: Report, checkpoint: Checkpoint) -> bool:
    return report.identity == identity_of(checkpoint)


def make_card(
    state: CheckpointState, repo: str, measurements: Sequence[Sequence[Report]] = (), base: str | None = None
) -> "ModelCard":
    """Make the card of a checkpoint folder for the Hub repository `repo`.

    measurements: of each file, see read_measurements. base: the Hub id of the base model, None if unknown. Raises
    CheckpointError for a README.md whose metadata are not a YAML mapping, DataError for one that is not UTF-8.
    """
    from huggingface_hub import ModelCard, ModelCardData
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    path = state.checkpoint.folder / README
    try:
        readme = _without_section(read_file(path)) if path.is_file() else ""
        block = REGEX_YAML_BLOCK.match(readme)
        data = ModelCardData(**_metadata(block[2] if block else "", state, base))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot become the model card: {reason_of(error)}. Correct it.") from error
    text = readme[block.end() if block else 0 :].strip()
    parts = [*_sections(state, repo, measurements, base)]
    if text:
        parts += ["## Before these changes", "The text below describes the base model."]
    section = "\n\n".join(parts).replace("<!--", "<! --")  # a name in the section could contain the end marker
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{BEGIN}\n\n{section}\n\n{_END}\n\n{text}\n")


def _without_section(readme: str) -> str:
    before, _, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(_END)
    return before + after if end else readme


def _metadata(block: str, state: CheckpointState, base: str | None) -> dict[str, Any]:
    """The metadata of the card, from the YAML block of README.md. Raises TypeError, ValueError."""
    metadata = read_yaml(block) or {}
    if not isinstance(metadata, dict):
        raise ValueError(f"its metadata are a {type(metadata).__name__}; expected a mapping")
    kept = {key: value for key, value in metadata.items() if key not in _DROPPED_METADATA}
    tags = kept.get("tags") or []
    keywords = ["long-context", "rope", *state.positions.main.spec.method.name.split("+")]
    kept["tags"] = list(dict.fromkeys([*([tags] if isinstance(tags, str) else tags), *keywords, "ropecli"]))
    kept["library_name"] = "transformers"
    if base:
        kept["base_model"] = base
    if base and _trained(state.checkpoint.record):
        kept["base_model_relation"] = "finetune"  # the Hub has no relation for another config with the same weights
    return kept


def _sections(
    state: CheckpointState, repo: str, measurements: Sequence[Sequence[Report]], base: str | None
) -> Iterator[str]:
    """The Markdown of the section, in order."""
    yield f"# {escaped(repo.rpartition('/')[2])}"
    if base:
        yield f"Base model: {_hub_link(base)}."
    record = state.checkpoint.record
    yield from (describe(record[key], record) for key, describe in _STEPS.items() if key in record)
    if not _trained(record):
        yield "The weights are unchanged."
    yield "## Rotary embeddings"
    rope_table = inspection_table([inspect_checkpoint(state)])
    yield markdown(replace(rope_table, title=""))
    yield "## Measured"
    yield from (part for reports in measurements for part in _describe_file(reports, state.checkpoint, repo))
    if not measurements:
        yield "No measurement was given."
    yield "## Use"
    yield from _loading(state, repo)


def _trained(record: dict[str, Any]) -> bool:
    """Return whether the weights differ from those of the base model. record: of ropecli.yaml."""
    return "finetuned" in record or "merged" in record


def _scaling(scaling: dict[str, Any], record: dict[str, Any]) -> str:
    label = label_of(scaling["method"], float(scaling["factor"]), scaling["params"])
    pretrained, target = record["original_max_position_embeddings"], record["target_length"]
    return (
        f"ropecli {escaped(record['ropecli'])} patched {_source(record['source'])} with {escaped(label)} "
        f"({escaped(find_method(scaling['method']).source)}): the context length is {target:,} tokens, the "
        f"pretraining length {pretrained:,}."
    )


def _finetuned(run: dict[str, Any], record: dict[str, Any]) -> str:
    recipe = run["recipe"]
    data = ", ".join(_code(_public_name(source["data"])) for source in recipe.get("mixture") or [recipe])
    sequences = recipe["batch_size"] * recipe["gradient_accumulation"] * run.get("processes", 1)
    adapter = "" if recipe["adapter"] == "none" else f", adapter {_code(recipe['adapter'])}"
    return (
        f"`ropecli finetune` trained it for {recipe['steps']:,} steps of {sequences:,} sequences of {run['length']:,} "
        f"tokens from {data}: learning rate {recipe['learning_rate']:g}{adapter}."
    )


def _merged(merged: dict[str, Any], record: dict[str, Any]) -> str:
    return f"`ropecli merge` merged an adapter into {_source(merged['base'])}."


_STEPS = {"scaling": _scaling, "finetuned": _finetuned, "merged": _merged}
"""Functions that describe an entry of ropecli.yaml, in the order of the steps. Arguments: the entry, the record."""


def _source(origin: dict[str, Any]) -> str:
    """A checkpoint: a link to the commit on the Hub, or the name of its folder."""
    name, commit = str(origin["checkpoint"]), origin.get("commit")
    if commit is None or not HUB_ID.fullmatch(name):
        is_stage = Path(name).parent.name == STAGES  # `finetune` saves the result of stage 1 in stages/1
        return f"the result of stage {escaped(Path(name).name)}" if is_stage else _code(_public_name(name))
    return _hub_link(name, str(commit))


def _hub_link(name: str, revision: str | None = None) -> str:
    """A link to a model on the Hub."""
    tree = f"/tree/{quote(revision, errors='replace')}" if revision else ""
    return f"[{escaped(name)}](https://huggingface.co/{quote(name)}{tree})"


def _code(value: object) -> str:
    """A value as a code span, also in table cells."""
    text = clean(str(value), LONGEST_TEXT).replace("`", "'").replace("|", "\\|")
    return f"`{text}`"


def _public_name(value: object) -> str:
    """A Hub id or relative path unchanged; only the last part of an absolute path, which may name a user."""
    name = str(value)
    return Path(name).name if Path(name).is_absolute() or name.startswith("~") else name


def _describe_file(reports: Sequence[Report], checkpoint: Checkpoint, repo: str) -> Iterator[str]:
    """The tables of one file, the data, and the versions."""
    of_checkpoint = [_named(report, repo) for report in reports if _is_of(report, checkpoint)]
    named = [_named(report, repo if _is_of(report, checkpoint) else None) for report in reports]
    yield from map(markdown, measured_tables(named))
    if len(reports) > 1 and not of_checkpoint[0].by_row:
        yield from (markdown(table) for report in of_checkpoint for table in measured_tables([report]))
    first = of_checkpoint[0]
    versions = ", ".join(f"{name} {version}" for name, version in first.environment.items())
    yield f"Data: {_code(first.source)}; {escaped(first.dtype)} on {escaped(first.device)}; {escaped(versions)}."


def _named(report: Report, name: str | None = None) -> Report:
    """The report under the name of the repository, or without the path of a local folder."""
    name, source = name or _public_name(report.checkpoint), _public_name(report.source)
    reference = report.reference and replace(report.reference, name=_public_name(report.reference.name))
    return replace(report, checkpoint=name, source=source, reference=reference)


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
        yield (
            "Run `import ropecli.attention` before transformers loads this checkpoint: config.json names an attention "
            "function that this import registers. Other engines would run standard attention."
        )
    else:
        yield f"To serve it, run the command that `ropecli export {repo} --engine vllm` prints, or name another engine."
