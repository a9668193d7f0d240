"""Renders an engine's table: the launch command, its config file, and how the engine differs from transformers."""

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropecli.atomic import new_file
from ropecli.checkpoint.opening import Checkpoint
from ropecli.config.findings import Finding
from ropecli.config.layers import acts_nowhere
from ropecli.engines import llama_cpp, lm_eval, mlx, sglang, trainers, vllm
from ropecli.engines.engine_table import Case, EngineInput, read_input
from ropecli.errors import MethodError, PatchError


@dataclass(frozen=True)
class Export:
    """Result of `ropecli export`.

    command: one line to paste. overrides: the config values that the command overrides, or the contents of the config
    file that it reads. cannot: sentences on how the engine differs from stock transformers. notes: further remarks.
    findings: those of `inspect` that change what is computed. file_name, file_text: the config file, empty if there is
    none. written: whether it was written.
    """

    engine: str
    command: str
    overrides: Mapping[str, Any]
    cannot: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    file_name: str = ""
    file_text: str = ""
    written: bool = False

    def as_json(self) -> dict[str, Any]:
        values = {key: getattr(self, key) for key in ("engine", "command", "overrides", "cannot", "notes")}
        return {**values, "findings": [finding.as_json() for finding in self.findings]}


ENGINES = {
    "axolotl": trainers.AXOLOTL,
    "llama-factory": trainers.LLAMA_FACTORY,
    "llama.cpp": llama_cpp.LLAMA_CPP,
    "lm-eval": lm_eval.ENGINE,
    "mlx": mlx.ENGINE,
    "ms-swift": trainers.MS_SWIFT,
    "ollama": llama_cpp.OLLAMA,
    "sglang": sglang.ENGINE,
    "trl": trainers.TRL,
    "unsloth": trainers.UNSLOTH,
    "vllm": vllm.ENGINE,
}


def export_checkpoint(checkpoint: Checkpoint, name: str, output: Path | None = None) -> Export:
    """Build the launch command of engine `name` for this checkpoint, and write its config file to `output`.

    Raises MethodError for an `output` without a config file, PatchError where the engine does not
    support the checkpoint's positions, OSError where `output` cannot be written.
    """
    engine = ENGINES[name]
    if output and not engine.file_name:
        raise MethodError(f"{engine.title} needs no config file: its command has all options. Run it without --output.")
    p = read_input(checkpoint, trains=engine.trains, remaps=engine.remaps)
    for reason in _texts(engine.refused, p):
        raise PatchError(f"{engine.title} does not support the positions of {p.checkpoint}: {reason}")
    overrides, file_name = engine.overrides(p), str(output or engine.file_name)
    file_text = engine.file_text(overrides)
    if output:
        with new_file(output) as partial:
            partial.write_text(file_text, encoding="utf-8")
    return Export(
        engine=name,
        command=shlex.join(
            json.dumps(word) if isinstance(word, Mapping) else str(word)
            for word in [*engine.command(p), *([file_name] if file_name else [])]
        ),
        overrides=overrides,
        cannot=tuple(_texts(engine.cannot, p)),
        notes=tuple(_texts((acts_nowhere(p.state.settings.layers), *engine.notes, engine.without_options(p)), p)),
        findings=p.findings,
        file_name=file_name,
        file_text=file_text,
        written=output is not None,
    )


def vllm_overrides(checkpoint: Checkpoint, source: Checkpoint, length: int) -> dict[str, Any]:
    """The config values to override, with which vLLM computes the checkpoint's positions from the source's config.json.

    length: tokens to read. Raises PatchError for positions that vLLM does not support, and for a length beyond the
    context length of a scaling, for which vLLM has no table.
    """
    overrides, p = dict(export_checkpoint(checkpoint, "vllm").overrides), read_input(checkpoint)
    if p.only_in_config:
        old = source.config
        overrides |= {key: value for key, value in checkpoint.config.items() if old.get(key) != value}
    if length > p.length:
        if p.scaled:
            raise PatchError(f"vLLM reads {p.length} tokens with this scaling; --lengths asks for {length}.")
        overrides |= p.in_section({p.length_key: length})
    return overrides


def _texts(cases: Iterable[Case | str], p: EngineInput) -> Iterator[str]:
    for case in cases:
        text = case if isinstance(case, str) else case.text if case.holds(p) else ""
        if text:
            yield text.format(p=p)
