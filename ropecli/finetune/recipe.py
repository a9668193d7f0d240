"""The recipe of a fine-tuning run: its keys, their defaults and bounds. Refuses unknown keys, all at once."""

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ropecli.errors import RecipeError

Beta = Annotated[float, Field(ge=0, lt=1)]


class Recipe(BaseModel):
    """What `ropecli finetune` does. Lengths in tokens; one step is one update of the weights."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    data: str = Field(description="a source: demo-train, a file or folder, or a Hub dataset id")
    text_column: str = Field("text", description="of tables, the column that holds the text")
    split: str | None = Field(None, description="of a Hub dataset")
    max_documents: int | None = Field(None, ge=1, description="use at most so many documents")
    length: int | None = Field(None, ge=2, description="of a sequence; the checkpoint's extended window by default")
    steps: int = Field(100, ge=1)
    batch_size: int = Field(1, ge=1, description="sequences per process and forward pass")
    gradient_accumulation: int = Field(4, ge=1, description="passes per step")
    learning_rate: float = Field(2e-5, gt=0, allow_inf_nan=False)
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: int = Field(20, ge=0)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    max_grad_norm: float = Field(1.0, gt=0, allow_inf_nan=False)
    mixed_precision: Literal["bf16", "none"] = "bf16"  # not Accelerate's "no", which YAML reads as false
    gradient_checkpointing: bool = True
    save_every: int = Field(50, ge=1, description="steps between checkpoints")
    keep_checkpoints: int = Field(2, ge=1)
    seed: int = Field(0, ge=0, lt=2**63)


class _UniqueKeys(yaml.SafeLoader):
    """A key given twice is an error: YAML's own readers let the last one win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [key.value for key, _ in node.value]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise yaml.YAMLError(f"the key {twice!r} is given twice")
        return super().construct_mapping(node, deep)


def make_recipe(path: Path | None, options: dict[str, Any]) -> Recipe:
    """The recipe file's keys, overridden by the options that are not None. Raises RecipeError listing all faults."""
    values: dict[str, Any] = {}
    if path is not None:
        try:
            loaded = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise RecipeError(f"{path} cannot be read as YAML: {error}") from error
        if not isinstance(loaded, dict):
            raise RecipeError(f"{path} holds {type(loaded).__name__}; a recipe is a mapping of keys to values.")
        values = loaded
    values = {**values, **{key: value for key, value in options.items() if value is not None}}
    try:
        return Recipe(**values)
    except ValidationError as error:
        raise RecipeError(_all_faults(error, path)) from error
    except TypeError as error:  # keys that are no strings
        raise RecipeError(f"{path}: every key must be a word: {error}") from error


def _all_faults(error: ValidationError, path: Path | None) -> str:
    lines = [f"The recipe{f' {path}' if path else ''} has {error.error_count()} fault(s):"]
    for fault in error.errors():
        key = ".".join(str(part) for part in fault["loc"])
        given = "" if fault["type"] == "missing" else f" (given: {fault['input']!r})"
        lines.append(f"  {key}: {fault['msg']}{given}")
    lines.append(f"Known keys: {', '.join(Recipe.model_fields)}.")
    return "\n".join(lines)
