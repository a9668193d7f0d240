"""The keys of a recipe that are options of `ropecli finetune`."""

from pathlib import Path
from typing import Annotated, TypedDict

from annotated_doc import Doc

from ropecli.atomic import as_path
from ropecli.options import DATA, IS_TRAINING_DATA, OUTPUT, TOKENS
from ropecli.signature import Check, Flag, Interval


def _check_recipe(name: str) -> None:
    from ropecli.training.recipe_files import recipe_path

    if path := recipe_path(as_path(name)):
        path.stat()


RecipeFile = Annotated[
    str | Path | None,
    Flag("--recipe", "-r", metavar="NAME|FILE"),
    Doc("A recipe that `ropecli recipe` lists, or a YAML file."),
    Check(_check_recipe),
]


class RecipeKeys(TypedDict, total=False):
    data: Annotated[
        str | None,
        Flag("--data", "-d"),
        Doc("'demo-train', a file or folder, or a Hub dataset id."),
        IS_TRAINING_DATA,
        DATA,
    ]
    text_column: Annotated[str | None, Doc("Column of a table with the text or conversations."), DATA]
    skip_faulty: Annotated[bool, Doc("Skip and count rows without a usable text. Default: as the recipe says."), DATA]
    split: Annotated[str | None, Doc("Split of a dataset. Default: train."), DATA]
    length: Annotated[
        int | None, Interval(ge=2, le=2**24), TOKENS, Doc("Tokens per sequence. Default: the context length.")
    ]
    sequences: Annotated[str | None, Doc("long, packed, concat or single."), DATA]
    positions: Annotated[str | None, Doc("full, pose or randomized."), DATA]
    steps: Annotated[int | None, Doc("Training steps.")]
    batch_size: Annotated[int | None, Doc("Sequences per process and forward pass.")]
    gradient_accumulation: Annotated[int | None, Doc("Forward passes per step.")]
    learning_rate: Annotated[float | None, Flag("--learning-rate", "--lr"), Doc("Peak learning rate.")]
    adapter: Annotated[str | None, Doc("none, lora, lora-plus (also embeddings and norms) or qlora. Default: none.")]
    eval_data: Annotated[str | None, Doc("Source on which to measure perplexity while training."), DATA]
    seed: Annotated[int | None, Doc("Random seed.")]
    tracker: Annotated[str | None, Doc("auto, none, tensorboard or wandb."), OUTPUT]
