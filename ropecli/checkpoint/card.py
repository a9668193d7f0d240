"""Describes in Markdown what ropecli did to a checkpoint, and keeps that as a marked section of its README.md.

The section is placed between the YAML metadata and the text of the README.md that a patch copies. Both stay unchanged
byte for byte, so a revert can take the section out again.
"""

import contextlib
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ropecli.checkpoint.files import is_own_file, read_file
from ropecli.checkpoint.opening import HUB_ID, Checkpoint
from ropecli.checkpoint.provenance import Provenance, entry, patch_command, tuned_weights
from ropecli.checkpoint.state import CheckpointState, far_layers, read_state
from ropecli.config.settings import read_settings
from ropecli.scaling.registry import find_method
from ropecli.scaling.spec import ScaledRope, label_of
from ropecli.table import LONGEST_TEXT, Table, clean, escaped, markdown
from ropecli.yaml12 import read_own_yaml

README = "README.md"
_BEGIN, _END = "<!-- ropecli:begin -->", "<!-- ropecli:end -->"
_SECTION = re.compile(rf"\n?{_BEGIN}.*?{_END}\n?".encode(), re.DOTALL)
_METADATA = re.compile(
    rb"\A(?:\xef\xbb\xbf)?\s*---[ \t]*(?:\r\n|\r|\n)(.*?)(?:\r\n|\r|\n)---[ \t]*(?:\r\n|\n|\Z)", re.DOTALL
)


def with_section(readme: bytes, section: str) -> bytes:
    """Put the section, Markdown, between the metadata and the text of a README.md. Replaces an earlier section."""
    readme = without_section(readme)
    metadata = _METADATA.match(readme)
    start = metadata.end() if metadata else 0
    section = section.strip().replace("<!--", "<! --")  # a name in the section could contain the end marker
    block = f"\n{_BEGIN}\n\n{section}\n\n{_END}\n"
    return readme[:start] + block.encode() + readme[start:]


def without_section(readme: bytes) -> bytes:
    """The README.md before `with_section`."""
    # search up to the last end marker and its \n only: after it, every begin marker would scan the whole rest
    head, end, tail = readme.rpartition(_END.encode())
    return _SECTION.sub(b"", head + end + tail[:1]) + tail[1:]


def split_metadata(readme: bytes) -> tuple[str, bytes]:
    """The YAML of the metadata block, empty if there is none, and the text after the block. Raises ValueError."""
    block = _METADATA.match(readme)
    return (block[1].decode(), readme[block.end() :]) if block else ("", readme)


def add_section(readme: Path, checkpoint: Checkpoint) -> None:
    """Put the section into a README.md that belongs to `checkpoint`, as patched or trained. Raises OSError.

    The file must be a copy: a hard link would change the source's.
    """
    state = read_state(checkpoint)
    section = [
        f"## Context length: {state.positions.context_length:,} tokens",
        *describe_changes(state),
        rope_table(state),
        *([NEEDS_ROPECLI] if state.positions.main.remapping else []),
        "The text below describes the checkpoint before these changes.",
    ]
    readme.write_bytes(with_section(readme.read_bytes(), "\n\n".join(section)))


NEEDS_ROPECLI = (
    "Run `import ropecli.attention` before transformers loads this checkpoint: config.json names an attention function "
    "that this import registers."
)


def describe_changes(state: CheckpointState) -> list[str]:
    """Paragraphs on what was done, in order, from ropecli.yaml. Skips entries that are incomplete."""
    record, note = state.checkpoint.record, state.note
    steps = []
    for key, describe in _STEPS.items():
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError, OverflowError):
            if key in record:
                steps.append(describe(record[key], record))
    if not trained(record):
        steps.append("The weights are unchanged.")
    # no command if `ropecli tune` or a recipe made the patch, not `ropecli patch`
    patched_by_recipe = entry(entry(record, "finetuned"), "recipe").get("patch")
    if note and "tuned" not in record and not patched_by_recipe:
        steps.append(f"```\n{_patch_command(note, record)}\n```")
    return steps


def trained(record: dict[str, Any]) -> bool:
    """Return whether the weights differ from those of the base model. record: of ropecli.yaml."""
    return tuned_weights(record) or "finetuned" in record or "merged" in record


def _scaling(scaling: dict[str, Any], record: dict[str, Any]) -> str:
    label = label_of(scaling["method"], float(scaling["factor"]), scaling["params"])
    pretrained, target = record["original_max_position_embeddings"], record["target_length"]
    return (
        f"ropecli {escaped(record['ropecli'])} patched {_source(record['source'])} with {escaped(label)} "
        f"({escaped(find_method(scaling['method']).source)}): the context length is {target:,} tokens, the "
        f"pretraining length {pretrained:,}."
    )


def _tuned(tuned: dict[str, Any], record: dict[str, Any]) -> str:
    training = ""
    if tuned_weights(record):
        training = f" and trained {tuned['learned']:,} parameters in {tuned['steps']:,} steps"
    return (
        f"{code('ropecli tune --level ' + tuned['level'])} chose these constants from {tuned['points']:,} "
        f"measurements{training}, on {code(public_name(tuned['data']))}."
    )


def _finetuned(run: dict[str, Any], record: dict[str, Any]) -> str:
    recipe = run["recipe"]
    data = ", ".join(code(public_name(source["data"])) for source in recipe.get("mixture") or [recipe])
    sequences = recipe["batch_size"] * recipe["gradient_accumulation"] * run.get("processes", 1)
    adapter = "" if recipe["adapter"] == "none" else f", adapter {code(recipe['adapter'])}"
    return (
        f"`ropecli finetune` trained it for {recipe['steps']:,} steps of {sequences:,} sequences of {run['length']:,} "
        f"tokens from {data}: learning rate {recipe['learning_rate']:g}{adapter}."
    )


def read_run(folder: Path) -> dict[str, Any]:
    """Read run.yaml, which `finetune` writes: the source and the whole recipe. Empty if there is none."""
    path = folder / "run.yaml"
    return read_file(path, read_own_yaml) if is_own_file(path) else {}


def _merged(merged: dict[str, Any], record: dict[str, Any]) -> str:
    return f"`ropecli merge` merged an adapter into {_source(merged['base'])}."


_STEPS = {"scaling": _scaling, "tuned": _tuned, "finetuned": _finetuned, "merged": _merged}
"""Functions that describe an entry of ropecli.yaml, in the order of the steps. Arguments: the entry, the record."""


def _source(origin: dict[str, Any]) -> str:
    """A checkpoint: a link to the commit on the Hub, or the name of its folder."""
    name, commit = str(origin["checkpoint"]), origin.get("commit")
    if commit is None or not HUB_ID.fullmatch(name):
        is_stage = Path(name).parent.name == "stages"  # `finetune` saves the result of stage 1 in stages/1
        return f"the result of stage {escaped(Path(name).name)}" if is_stage else code(public_name(name))
    return hub_link(name, str(commit))


def hub_link(name: str, revision: str | None) -> str:
    """A link to a model on the Hub."""
    tree = f"/tree/{quote(revision, errors='replace')}" if revision else ""
    return f"[{escaped(name)}](https://huggingface.co/{quote(name)}{tree})"


def _patch_command(note: Provenance, record: dict[str, Any]) -> str:
    """The `ropecli patch` command that writes the same config.json, with the options that are not defaults."""
    source, before = entry(record, "source"), read_settings(note.original)
    options: dict[str, object] = {}
    if round(note.original_length * note.factor) != note.target_length:
        options["target_length"] = note.target_length
    if before.ropes[0].geometry.original_max_position_embeddings != note.original_length:
        options["original_length"] = note.original_length
    if note.layer_types != far_layers(before):
        options["layer_types"] = ",".join(map(str, note.layer_types))
    name, commit = public_name(source.get("checkpoint", "CHECKPOINT")), source.get("commit")
    command = patch_command(name, commit and str(commit), note.method, note.factor, note.params, options=options)
    return clean(command, LONGEST_TEXT)


def rope_table(state: CheckpointState) -> str:
    """The rotary embeddings in effect, one column per layer type."""
    positions, ropes = state.positions, state.positions.ropes.values()
    rows = [
        ["context length", f"{positions.context_length:,} tokens", *[""] * (len(ropes) - 1)],  # the same for all layers
        ["pretraining length", *(f"{rope.geometry.original_max_position_embeddings:,} tokens" for rope in ropes)],
        ["method", *(rope.spec.label for rope in ropes)],
        ["rope_theta", *(f"{rope.rope_theta:,.10g}" for rope in ropes)],
        ["attention factor", *(f"{rope.attention_factor:.6g}" for rope in ropes)],
        ["rotated dimensions", *(f"{rope.geometry.rotary_dim} of {rope.geometry.head_dim}" for rope in ropes)],
        ["wavelengths", *map(_wavelengths, ropes)],
    ]
    return markdown(Table("", ["", *(label or "" for label in positions.ropes)], rows))


def _wavelengths(rope: ScaledRope) -> str:
    rotating = rope.wavelength[rope.inv_freq > 0]
    return f"{rotating.min():,.4g} to {rotating.max():,.6g} tokens" if rotating.size else "no pair rotates"


def code(value: object) -> str:
    """A value as a code span, also in table cells."""
    text = clean(str(value), LONGEST_TEXT).replace("`", "'").replace("|", "\\|")
    return f"`{text}`"


def public_name(value: object) -> str:
    """A Hub id or relative path unchanged; only the last part of an absolute path, which may name a user."""
    name = str(value)
    return Path(name).name if Path(name).is_absolute() or name.startswith("~") else name
