"""The reports of evaluations: everything that a table or a figure needs. Plain JSON on disk."""

import json
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Interval, Len

from ropecli.atomic import new_file
from ropecli.evaluation.results import Count, Headline, LengthResult, TokenCount
from ropecli.scaling.spec import label_of
from ropecli.version import VERSION

SCHEMA_VERSION = 2
Factor = Annotated[float, Interval(gt=0, le=1e12)]
Fraction = Annotated[float, Interval(ge=0, le=1)]


def environment() -> dict[str, str]:
    import torch
    import transformers

    versions = {"ropecli": VERSION, "torch": torch.__version__, "transformers": transformers.__version__}
    return {**versions, "python": platform.python_version()}


@dataclass(frozen=True)
class BaseReport:
    """What every report of an evaluation holds: the checkpoint, its scaling, the data and the machine.

    digest: of the checkpoint. method, factor, params: the scaling in effect. in_memory: whether the model was patched
    in memory. original_max_position_embeddings: the pretraining length, tokens. source: the data. command: what made
    the report, word by word.
    """

    checkpoint: str
    digest: str
    method: str
    factor: Factor
    params: dict[str, Any]
    in_memory: bool
    original_max_position_embeddings: TokenCount
    source: str
    dtype: str
    device: str
    command: list[str]

    @property
    def label(self) -> str:
        return self.method if self.method == "none" else label_of(self.method, self.factor, self.params)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class EvalReport(BaseReport):
    """One model's perplexity by length, with the protocol, the data and the versions that gave it.

    settings: the protocol's stride and targets, and how the passes were made. fingerprint: sha256 of the token ids
    read. too_short: documents left out. baseline: the same of another checkpoint on the same documents; headlines: what
    follows from the two.
    """

    protocol: str
    settings: dict[str, Any]
    fingerprint: str
    too_short: int
    rows: Annotated[list[LengthResult], Len(1, 10_000)]
    document_names: list[str]
    baseline: "EvalReport | None" = None
    headlines: list[Headline] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=environment)
    kind: str = "perplexity"
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True)
class RetrievalCell:
    """Keys looked for at one length and depth. trials: prompts. hits: of these, how many gave the true key.

    depth: where the key stood, 0 for the beginning of the text, 1 for its end. found: the hits trial by trial; the
    prompts of two reports with one fingerprint are the same, and can be paired. margin: mean log-probability of the
    true key less the best other candidate's, nats; rank: mean place of the true key among the candidates, 1 the first;
    both None where the answer was generated.
    """

    length: TokenCount
    depth: Fraction
    trials: TokenCount
    hits: Count
    rank: float | None = None
    margin: float | None = None
    found: tuple[bool, ...] = ()

    @property
    def accuracy(self) -> float:
        return self.hits / self.trials


@dataclass(frozen=True)
class RetrievalReport(BaseReport):
    """How often a model finds a key in a long text. task: passkey or needle. mode: generate or rank.

    settings: the needle, the question, the number of keys and candidates, the seed. fingerprint: sha256 of all prompts
    and true keys. chance: accuracy of a guess.
    """

    task: str
    mode: str
    settings: dict[str, Any]
    fingerprint: str
    chance: Fraction
    cells: Annotated[list[RetrievalCell], Len(1, 10_000)]
    environment: dict[str, str] = field(default_factory=environment)
    kind: str = "retrieval"
    schema_version: int = SCHEMA_VERSION


def write_report(path: Path, value: Any) -> None:
    """Writes JSON, whole or not at all. Raises OutputError."""
    with new_file(path) as partial:
        partial.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")
