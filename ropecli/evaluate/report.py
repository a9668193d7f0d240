"""EvalReport: what a table or a plot needs to know of an evaluation, and nothing else. Plain JSON on disk."""

import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ropecli.atomic import new_file
from ropecli.errors import OutputError
from ropecli.evaluate.perplexity import Row
from ropecli.scaling.registry import get_method
from ropecli.version import VERSION

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class EvalReport:
    """One model's perplexity by length, with the protocol, the data and the versions that gave it.

    fingerprint: sha256 of the token ids read. digest: of the checkpoint. params: the scaling method's. in_memory:
    whether the model was patched in memory. original_max_position_embeddings: the pretraining window, tokens.
    """

    checkpoint: str
    digest: str
    method: str
    factor: float
    params: dict[str, Any]
    in_memory: bool
    original_max_position_embeddings: int
    protocol: str
    source: str
    fingerprint: str
    too_short: int
    dtype: str
    device: str
    rows: list[Row]
    document_names: list[str]

    @property
    def label(self) -> str:
        """Method, factor, and the parameters that are not the method's own defaults."""
        if self.method == "none":
            return self.method
        known = get_method(self.method).parameters
        numbers = {key: value for key, value in self.params.items() if isinstance(value, int | float)}
        own = [f"{key} {value:g}" for key, value in numbers.items() if key in known and value != known[key].default]
        return f"{self.method} ×{self.factor:g}" + (f" ({', '.join(own)})" if own else "")

    def as_json(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION, **asdict(self), "environment": environment()}


def environment() -> dict[str, str]:
    import torch
    import transformers

    versions = {"ropecli": VERSION, "torch": torch.__version__, "transformers": transformers.__version__}
    return {**versions, "python": platform.python_version()}


def refuse_unwritable(path: Path | None) -> None:
    """Raises OutputError for a file that could not be written, before hours are spent on what it should hold."""
    if path is None:
        return
    try:
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        writable = not path.is_dir() and folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
    except OSError as error:
        raise OutputError(f"{str(path)[:80]} cannot be written: {error.strerror}") from error
    if not writable:
        reason = "it is a folder" if path.is_dir() else f"{folder} is no folder that can be written to"
        raise OutputError(f"{path} could not be written: {reason}.")


def write_report(path: Path, value: Any) -> None:
    """Writes JSON, whole or not at all. Raises OutputError."""
    with new_file(path) as partial:
        partial.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")
