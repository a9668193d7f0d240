"""The recipes that come with ropecli, found by name, and the configurations of `accelerate launch`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ropecli.errors import RecipeError, did_you_mean

_PACKAGE = Path(__file__).parents[1]
Kind = Literal["finetune", "accelerate"]


@dataclass(frozen=True)
class ShippedFile:
    """kind: finetune, a recipe; accelerate, a configuration of `accelerate launch`."""

    kind: Kind
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
        return self.text.partition("\n")[0].lstrip("# ")


def recipe_files(*kinds: Kind) -> dict[str, ShippedFile]:
    """The files of these kinds, by name."""
    # in an installed package, or else in the source tree
    folder = next(path for path in (_PACKAGE / "recipes", _PACKAGE.parent / "recipes") if path.is_dir())
    files = [ShippedFile(kind, path) for kind in kinds for path in sorted((folder / kind).glob("*.yaml"))]
    return {file.name: file for file in files}


def find_file(name: str, files: dict[str, ShippedFile]) -> ShippedFile:
    """The one of that name. Raises RecipeError."""
    if name not in files:
        raise RecipeError(f"Unknown recipe {name!r}.{did_you_mean(name, files)} `ropecli recipe` lists all.")
    return files[name]


def recipe_path(recipe: Path | None) -> Path | None:
    """The file of a recipe that the user gave by name or by path. Raises RecipeError for an unknown name."""
    if recipe is None or recipe.name != str(recipe) or recipe.suffix in (".yaml", ".yml"):
        return recipe
    files = recipe_files("finetune")
    return recipe if recipe.is_file() and str(recipe) not in files else find_file(str(recipe), files).path
