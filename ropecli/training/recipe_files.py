"""The recipes and configurations that come with the package."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ropecli.errors import RecipeError, did_you_mean


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
