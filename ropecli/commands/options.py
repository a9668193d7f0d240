"""Options that several commands share, each declared once: name, type and help.

An option's name is its parameter's, as --max-documents for max_documents, unless a Flag says otherwise.
"""

import math
import os.path
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_doc import Doc
from annotated_types import Ge

from ropecli.errors import MethodError, shown
from ropecli.evaluation.protocol_descriptions import PROTOCOLS


@dataclass(frozen=True)
class Flag:
    """How the command line spells an option, as Flag("--set", "-s"). metavar: what stands for its value in help."""

    name: str
    short: str | None = None
    metavar: str | None = None


Checkpoint = Annotated[str, Doc("A folder, a Hub id (owner/name), or 'demo'.")]
Revision = Annotated[str | None, Doc("Of a Hub id: a branch, a tag or a commit.")]

# Scaling
Factor = Annotated[float | None, Doc("Target length ÷ pretraining length.")]
Settings = Annotated[
    Mapping[str, Any] | None, Flag("--set", metavar="KEY=VALUE"), Doc("A parameter of the method; repeatable.")
]
SeveralSettings = Annotated[
    Mapping[str, Any] | None,
    Flag("--set", metavar="[METHOD.]KEY=VALUE"),
    Doc("A parameter of one of the methods; repeatable."),
]
FactorsFile = Annotated[
    str | Path | None,
    Doc(
        "Numbers for longrope or custom: a JSON list of factors, or an object with long_factor, factors or inv_freq; "
        "for longrope also a config.json that has them."
    ),
]
InMemory = Annotated[
    str | None,
    Flag("--method", "-m"),
    Doc("Patch the model in memory, by a method of `ropecli methods`; with --factor."),
]
OriginalLength = Annotated[int | None, Ge(1), Doc("The true pretraining length, where config.json names another.")]
Weights = Annotated[str, Doc("How to copy unchanged weights: link: hard-link where possible; copy: always copy.")]

# Evaluation
Data = Annotated[str, Flag("--data", "-d"), Doc("'demo', a file or folder of text or rows, or a Hub dataset id.")]
Lengths = Annotated[Sequence[int], Flag("--lengths", "-l"), Doc("Context lengths in tokens, as 256,512,1024.")]
ProtocolName = Annotated[str, Doc(" ".join(f"{name}: {protocol.summary}." for name, protocol in PROTOCOLS.items()))]
Stride = Annotated[int | None, Ge(1), Doc("sliding: tokens between windows; else half of each length.")]
Targets = Annotated[int | None, Ge(1), Doc("tail: tokens scored per document; else half the shortest length.")]
MaxDocuments = Annotated[int | None, Ge(1), Doc("Read at most so many documents.")]
MinTokens = Annotated[int | None, Ge(2), Doc("sliding, disjoint, yarn: leave out documents with fewer tokens.")]
MaxTokens = Annotated[int | None, Ge(2), Doc("sliding, disjoint, yarn: read at most so many tokens of each document.")]
TextColumn = Annotated[str, Doc("The column that holds the text, in tables.")]
Split = Annotated[str | None, Doc("The split of a Hub dataset; else test, validation or train.")]
Chunk = Annotated[
    int | None,
    Ge(0),
    Doc(
        "Tokens read at once, those before them being in a KV cache: less memory, more time. 0: all. By default all up "
        "to 32,768, and beyond that 1,024."
    ),
]
BatchSize = Annotated[int, Ge(1), Doc("Windows of the same length in one forward pass.")]
Dtype = Annotated[str, Doc("auto (float32 on a CPU, bfloat16 elsewhere), float32, bfloat16, float16.")]
Device = Annotated[str, Doc("auto (a GPU if there is one), cpu, cuda, cuda:1, mps.")]
Attn = Annotated[str, Doc("auto (as transformers chooses), sdpa, eager, flash_attention_2 or _3, flex_attention.")]
ReportFile = Annotated[str | Path | None, Flag("--output", "-o"), Doc("Write the report here, as JSON.")]
Resume = Annotated[bool, Doc("Go on with an interrupted run of the same --output; nothing is scored twice.")]

# Retrieval
PromptLengths = Annotated[
    Sequence[int], Flag("--lengths", "-l"), Doc("Tokens of the prompt with its answer, exactly, as 256,512,1024.")
]
Depths = Annotated[
    Sequence[float],
    Doc("Where the key stands: 0 the beginning of the text, 1 its end, right before the question."),
]
Trials = Annotated[int, Ge(1), Doc("Prompts for each length and depth.")]
Mode = Annotated[
    str,
    Doc(
        "rank: the key has the highest log-probability among --candidates, which any base model can be asked. "
        "generate: the greedy answer begins with the key."
    ),
]
Candidates = Annotated[
    int | None,
    Ge(2),
    Doc("rank: the true key, those of other needles, and some not in the text; else 10. At most 1000."),
]
Seed = Annotated[int, Ge(0), Doc("Of keys and texts: the same for every model with the same tokenizer.")]
HeatMap = Annotated[str | Path | None, Doc("Draw a heat map here: .png, .svg or .pdf.")]

# Training
RecipeFile = Annotated[str | Path | None, Flag("--recipe", "-r"), Doc("A YAML recipe; see recipes/.")]
OutputFolder = Annotated[str | Path, Flag("--output", "-o"), Doc("The folder to write.")]


def sorted_numbers(numbers: Sequence[Any], option: str) -> list[Any]:
    """Without repeats, the smallest first. Raises MethodError for none, and for what is not above 0."""
    found = sorted(set(numbers))
    if not found or not all(0 < number < math.inf for number in found):
        raise MethodError(f"{option} is {shown(list(numbers))}; it must be positive numbers, as 256,512.")
    return found


def as_path(path: str | Path) -> Path:
    """The path with `~` expanded: no shell expands `--output=~/x`."""
    # Path.expanduser raises for an unknown user; ~name is then the name of a file
    return Path(os.path.expanduser(path))  # noqa: PTH111


def optional_path(path: str | Path | None) -> Path | None:
    return None if path is None else as_path(path)


def is_link(weights: str) -> bool:
    """Whether unchanged weights are to be hard-linked. Raises MethodError for what is neither link nor copy."""
    if weights not in ("link", "copy"):
        raise MethodError(f"--weights is {weights!r}; it must be 'link' or 'copy'.")
    return weights == "link"


def listed(values: Any) -> list[Any]:
    """One value, or several, as a list."""
    return [values] if isinstance(values, str | Path) else list(values)
