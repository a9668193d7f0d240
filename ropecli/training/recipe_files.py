"""The recipes and configurations that come with the package, and the options of commands that take a recipe."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypedDict

from annotated_doc import Doc

from ropecli.atomic import as_path
from ropecli.errors import RecipeError, did_you_mean
from ropecli.options import DATA, IS_DATA, OUTPUT, TOKENS
from ropecli.signature import Check, Flag, Interval


@dataclass(frozen=True)
class ShippedFile:
    """kind: finetune, a recipe; accelerate, a configuration of `accelerate launch` or a job that calls it."""

    kind: Literal["finetune", "accelerate"]
    path: Path

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def summary(self) -> str:
        """The first comment line."""
        return next((line[2:] for line in self.text.splitlines() if line.startswith("# ")), "")


def recipe_files(*kinds: Literal["finetune", "accelerate"]) -> dict[str, ShippedFile]:
    """The files of these kinds, by name, from an installed package or the source tree."""
    package = Path(__file__).parents[1]
    folder = next(path for path in (package / "recipes", package.parent / "recipes") if path.is_dir())
    paths = [(kind, path) for kind in kinds for path in (folder / kind).iterdir() if path.suffix in (".yaml", ".sh")]
    return {
        path.stem: ShippedFile(kind, path)
        for kind, path in sorted(paths, key=lambda each: (each[0] == "accelerate", each[1].stem))
    }


def find_file(name: str, files: dict[str, ShippedFile]) -> ShippedFile:
    """Raises RecipeError for an unknown name."""
    if name not in files:
        raise RecipeError(f"Unknown recipe {name!r}.{did_you_mean(name, files)} `ropecli recipe` lists all.")
    return files[name]


def recipe_path(recipe: Path | None) -> Path | None:
    """The file of a recipe that the user gave by name or by path. Raises RecipeError for an unknown name."""
    if recipe is None or recipe.name != str(recipe) or recipe.suffix in (".yaml", ".yml"):
        return recipe
    files = recipe_files("finetune")
    return recipe if recipe.is_file() and str(recipe) not in files else find_file(str(recipe), files).path


def _check_recipe(name: str) -> None:
    if path := recipe_path(as_path(name)):
        path.stat()


RecipeFile = Annotated[
    str | Path | None,
    Flag("--recipe", "-r", metavar="NAME|FILE"),
    Doc("A recipe that `ropecli recipe` lists, or a YAML file."),
    Check(_check_recipe),
]


class RecipeKeys(TypedDict, total=False):
    """The keys of a recipe that are options of `ropecli finetune`."""

    data: Annotated[
        str | None,
        Flag("--data", "-d"),
        Doc("'demo-train', a file or folder, or a Hub dataset id."),
        IS_DATA,
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
