"""The settings of a fine-tuning run: the keys of a recipe, with defaults and bounds."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema, model_validator

from ropecli.checkpoint.files import read_file
from ropecli.errors import RecipeError, did_you_mean, shown
from ropecli.signature import Only, token_count, without_effect
from ropecli.yaml12 import read_yaml

Beta = Annotated[float, Field(ge=0, lt=1)]
Tokens = Annotated[
    int,
    BeforeValidator(token_count),
    Field(ge=2, le=2**40),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 2, "maximum": 2**40},
                {"type": "string", "pattern": "^[0-9]+[kKmM]?$"},
            ]
        }
    ),
]
_MOST = 10**6
_GAPS = Only("positions", ("pose", "randomized"))
_ADAPTED = Only("adapter", ("lora", "lora-plus", "qlora"))
_VALIDATED = Only("eval_data")


def _may_change(default: Any, **options: Any) -> Any:
    """A key that does not affect the weights, so that a resumed run may have another value."""
    return Field(default, json_schema_extra={"may_change_on_resume": True}, **options)


class _Keys(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Text(_Keys):
    """The documents of a source to use, and their layout. Lengths in tokens."""

    text_column: str = Field(
        "text",
        description="column of a table with texts or conversations; also found: messages; conversations; instruction "
        "and output; prompt and completion",
    )
    train_on: Literal["assistant", "each-answer", "all"] | None = Field(
        None,
        description="tokens of conversations to train on. assistant: all answers of a conversation. each-answer: the "
        "same, in a sequence per answer, which ends with it, as at inference. all: every token; default: assistant",
    )
    drop_unrendered: bool = Field(
        False,
        description="train without the parts of a conversation that the chat template leaves out; they are counted",
    )
    split: str | None = Field(None, description="split of a dataset; default: train")
    skip_faulty: bool = Field(False, description="skip rows of a table without a usable text, instead of refusing them")
    sequences: Literal["long", "packed", "concat", "single"] | None = Field(
        None,
        description="long: long documents, cut into sequences. packed: documents side by side, each attending to "
        "itself alone. concat: the same, attending to everything before. single: a document per sequence, padded; "
        "default: long for texts; for conversations packed, or single where they cannot be packed",
    )
    overlong: Literal["drop", "cut"] = Field(
        "drop", description="conversations longer than a sequence: dropped, or cut at the start of turns"
    )
    end_token: str | None = Field(
        None,
        description="token after each text of packed and concat sequences, or none; default: the one that ended a text "
        "in pretraining",
    )
    max_documents: int | None = Field(
        None, ge=1, description="maximum number of documents to read; default: all, or 10,000 of a Hub dataset"
    )
    max_tokens: Tokens | None = Field(None, description="maximum number of tokens, from documents in seeded order")
    long_from: Tokens | None = Field(None, description="documents from this length on are all used ...")
    keep_short: float = Field(
        1.0, ge=0, le=1, description="... and this share of the shorter ones, sampled with the seed"
    )


class RecipeSource(_Text):
    """One source of a mixture."""

    data: str = Field(description="demo-train, a file or folder, or a Hub dataset: owner/name or owner/name:config")
    weight: float = Field(1.0, gt=0, allow_inf_nan=False, description="share of the sequences, over all weights")


class Patch(_Keys):
    """The patch at the start of a stage, as made by `ropecli patch`."""

    method: str = Field(description="as `ropecli methods` lists them")
    factor: float | None = Field(None, ge=1, allow_inf_nan=False, description="target length ÷ pretraining length")
    target_length: Tokens | None = Field(None, description="instead of factor")
    original_length: Tokens | None = Field(None, description="pretraining length, if config.json names another")
    params: dict[str, Any] = Field(default_factory=dict, description="parameters of the method")


class Recipe(_Text):
    """The settings of `ropecli finetune`. Lengths in tokens; one step is one update of the weights."""

    data: str | None = Field(
        None, description="demo-train, a file or folder, or a Hub dataset: owner/name or owner/name:config"
    )
    mixture: tuple[RecipeSource, ...] = Field((), description="several sources, instead of data")

    patch: Patch | None = Field(None, description="patch the checkpoint first")
    length: Tokens | None = Field(None, description="tokens per sequence; default: the context length")
    positions: Literal["full", "pose", "randomized"] = Field(
        "full", description="full: 0, 1, 2 ... pose, randomized: with gaps, up to `window`"
    )
    window: Annotated[Tokens | None, _GAPS] = Field(
        None, description="tokens that positions with gaps span; default: the context length"
    )
    pose_chunks: Annotated[int, Only("positions", ("pose",))] = Field(
        2, ge=2, le=_MOST, description="runs of consecutive positions in a sequence"
    )

    steps: int = Field(100, ge=1, le=_MOST, description="updates of the weights")
    batch_size: int = Field(1, ge=1, le=_MOST, description="sequences per process and forward pass")
    gradient_accumulation: int = Field(4, ge=1, le=_MOST, description="passes per step")
    context_parallel_size: int = Field(1, ge=1, le=_MOST, description="processes that share each sequence")
    loss: Literal["next-token", "longce"] = Field(
        "next-token",
        description="longce: more weight on tokens that need a long context; a step takes about twice as long",
    )
    longce_cap: Annotated[float, Only("loss", ("longce",))] = Field(
        2.0, gt=1, allow_inf_nan=False, description="largest weight of a token; 5 in the paper, which copies too much"
    )
    loss_weighting: Literal["tokens", "documents"] = Field(
        "tokens", description="what counts the same in a step: each scored token, or each document, as in LongAlign"
    )
    learning_rate: float = Field(2e-5, gt=0, allow_inf_nan=False, description="peak learning rate")
    schedule: Literal["constant", "cosine", "linear"] = Field(
        "constant", description="after the warm-up; cosine ends at a tenth of the peak, linear at zero"
    )
    warmup_steps: int = Field(20, ge=0, le=_MOST, description="steps of linear warm-up")
    optimizer: Literal["adamw", "adamw-8bit"] = Field("adamw", description="adamw-8bit needs bitsandbytes")
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), description="AdamW's betas")
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False, description="applied to matrices only")
    max_grad_norm: float = Field(1.0, gt=0, allow_inf_nan=False, description="gradients are clipped to this norm")

    adapter: Literal["none", "lora", "lora-plus", "qlora"] = Field(
        "none", description="none: all parameters. lora-plus: also embeddings and norms. qlora: a base in 4 bits"
    )
    lora_rank: Annotated[int, _ADAPTED] = Field(8, ge=1, le=2**16, description="rank of the update")
    lora_alpha: Annotated[int, _ADAPTED] = Field(16, ge=1, le=2**16, description="updates are scaled by alpha ÷ rank")
    lora_dropout: Annotated[float, _ADAPTED] = Field(0.0, ge=0, lt=1, description="dropout before the update")
    lora_targets: Annotated[tuple[str, ...], _ADAPTED] = Field(
        (), description="module names, or all-linear, as in peft; default: the attention's projections"
    )
    save: Annotated[Literal["merged", "adapter"], _ADAPTED] = Field(
        "merged", description="merged: a whole checkpoint. adapter: only the adapter"
    )

    # not "no" as in Accelerate: YAML 1.1 reads that as false
    mixed_precision: Literal["bf16", "none"] = Field(
        "bf16",
        description="autocast dtype; weights stay in float32. A CPU without bfloat16 arithmetic trains in float32",
    )
    attn: str = Field("auto", description="attention implementation of transformers")
    gradient_checkpointing: bool | Literal["auto"] = _may_change(
        "auto", description="recompute layers in the backward pass. auto: only if memory would not suffice otherwise"
    )
    offload_activations: bool = Field(False, description="keep checkpointed activations in CPU memory")

    save_every: int = _may_change(50, ge=1, description="steps between checkpoints; of long steps, those of 20 minutes")
    keep_checkpoints: int = _may_change(2, ge=1, description="number of checkpoints to keep during the run")
    eval_data: str | None = _may_change(
        None, description="source on which to measure perplexity while training: its split test, validation or train"
    )
    eval_every: Annotated[int, _VALIDATED] = _may_change(50, ge=1, description="steps between measurements")
    eval_lengths: Annotated[tuple[Tokens, ...], _VALIDATED] = _may_change(
        (), description="tokens; default: the pretraining length and `length`"
    )
    eval_documents: Annotated[int, _VALIDATED] = _may_change(16, ge=1, description="documents to measure on")
    tracker: Literal["auto", "none", "tensorboard", "wandb"] = _may_change(
        "auto", description="auto: TensorBoard, if installed"
    )
    seed: int = Field(0, ge=0, lt=2**63, description="random seed")

    stages: tuple[dict[str, Any], ...] = Field(
        (), description="runs, one after the other; each overrides the keys above"
    )

    @model_validator(mode="after")
    def _check_combinations(self) -> "Recipe":
        if self.stages:
            return self  # each stage is checked with the keys that it inherits
        if (self.data is None) == (not self.mixture):
            raise ValueError("data is missing, or mixture, which has several sources; only one of them can be set")
        if self.mixture and (misplaced := sorted(self.model_fields_set & set(_Text.model_fields))):
            raise ValueError(f"set {misplaced[0]} in each source of the mixture instead")
        if self.offload_activations and self.gradient_checkpointing is False:
            raise ValueError("offload_activations needs gradient_checkpointing: true or auto")
        if messages := _without_effect(self.model_fields_set, vars(self)):
            raise ValueError(" ".join(messages.values()))
        if any((source.keep_short < 1) != (source.long_from is not None) for source in self.sources):
            raise ValueError("long_from, the minimum length of long documents, and keep_short below 1 need each other")
        if self.positions != "full" and (self.packs or self.loss == "longce"):
            raise ValueError("positions with gaps cannot be combined with --sequences packed or loss: longce")
        return self

    @property
    def sources(self) -> tuple[RecipeSource, ...]:
        """The sources of the mixture; `data` is a mixture of one."""
        if self.data is None:
            return self.mixture
        return (RecipeSource(data=self.data, **{key: getattr(self, key) for key in _Text.model_fields}),)

    @property
    def packs(self) -> bool:
        """Whether a source has packed documents."""
        return any(source.sequences == "packed" for source in self.sources)

    def record(self) -> dict[str, Any]:
        """A recipe file with the same effect, in JSON's types; without stages, it has the defaults too."""
        if self.stages:
            return self.model_dump(mode="json", exclude_unset=True)
        return self.model_dump(mode="json", exclude={"stages", *_without_effect(Recipe.model_fields, vars(self))})

    @property
    def runs(self) -> tuple["Recipe", ...]:
        """The stages as complete recipes, each with its own seed; this recipe itself if it has no stages."""
        if not self.stages:
            return (self,)
        return tuple(self.stage(number) for number in range(len(self.stages)))

    def stage(self, number: int) -> "Recipe":
        """The stage, from 0, as a complete recipe."""
        stage = self.stages[number]
        shared = self.model_dump(exclude={"stages"}, exclude_unset=True)
        if stage.keys() & {"data", "mixture"}:  # a stage's own data replaces the shared data
            shared = {key: value for key, value in shared.items() if key not in (*RecipeSource.model_fields, "mixture")}
        # keys above the stages may be for some of them
        of_others = _without_effect(shared.keys() - stage.keys(), {**shared, **stage})
        shared = {key: value for key, value in shared.items() if key not in of_others}
        return Recipe(**{**shared, "seed": self.seed + number, **stage})


def _without_effect(given: Iterable[str], values: Mapping[str, Any]) -> dict[str, str]:
    """A message for each of the keys `given` that has no effect. values: of keys that are set."""
    keys = Recipe.model_fields
    values = {**{name: key.default for name, key in keys.items()}, **values}
    given = sorted(key for key in given if values[key] is not None)
    return without_effect(given, values, {name: key.metadata for name, key in keys.items()})


MAY_CHANGE = tuple(name for name, key in Recipe.model_fields.items() if key.json_schema_extra)
"""Keys that do not affect the weights."""


def recipe_schema() -> dict[str, Any]:
    """The JSON schema of a recipe file."""
    schema = Recipe.model_json_schema()
    schema["properties"]["stages"]["items"] = {"$ref": "#"}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def make_recipe(path: Path | None, options: dict[str, Any]) -> Recipe:
    """Read the recipe file. The options override its keys in all stages; `data` overrides `mixture` too.

    None as an option takes the default of a key. Raises RecipeError listing all faults.
    """
    other = {"data": "mixture", "mixture": "data"}
    overridden = {*options, *(name for key, name in other.items() if options.get(key) is not None)}
    read = read_file(path, read_yaml, RecipeError) if path else {}
    if not isinstance(read, dict):
        raise RecipeError(f"{path} contains a {type(read).__name__}; expected a mapping of keys to values.")
    options = {key: value for key, value in options.items() if value is not None or key not in Recipe.model_fields}
    values = {**{key: value for key, value in read.items() if key not in overridden}, **options}
    recipe: Recipe | None = None
    faults: list[str] = []
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        faults += _faults(error)
    if recipe and recipe.stages:
        stages = [{key: value for key, value in stage.items() if key not in overridden} for stage in recipe.stages]
        recipe = recipe.model_copy(update={"stages": tuple(stages)})
        unused = recipe.model_fields_set - {"stages"}
        for number, stage in enumerate(stages):
            if "stages" in stage:
                faults.append(f"  stages.{number}: a stage cannot have stages")
                continue
            try:
                unused &= recipe.model_fields_set - recipe.stage(number).model_fields_set
            except ValidationError as error:
                faults += _faults(error, f"stages.{number}.")
        faults += [] if faults else [f"  {key}: it has no effect in any stage" for key in sorted(unused)]
    if faults or not recipe:
        raise RecipeError("\n".join([f"Invalid recipe{f' {path}' if path else ''}:", *faults]))
    return recipe


def _faults(error: ValidationError, prefix: str = "") -> list[str]:
    """One line per fault. prefix: the stage, put before the key."""
    known = {*Recipe.model_fields, *RecipeSource.model_fields, *Patch.model_fields}
    lines = []
    for fault in error.errors():
        key = (prefix + ".".join(str(part) for part in fault["loc"])).strip(".") or "as a whole"
        line = f"  {key}: {fault['msg'].removeprefix('Value error, ')}"
        if fault["type"] == "extra_forbidden":
            name = str(fault["loc"][-1])
            line += (
                ". Use --steps: training is counted in them." if "epoch" in name else "." + did_you_mean(name, known)
            )
        elif fault["type"] != "missing" and not isinstance(fault["input"], dict):
            line += f" (given: {shown(fault['input'])})"
        lines.append(line)
    return lines
