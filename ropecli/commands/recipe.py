"""`ropecli recipe`: lists the recipes that come with ropecli, or prints one."""

from dataclasses import dataclass
from typing import Annotated, Any

from annotated_doc import Doc

from ropecli.errors import RecipeError
from ropecli.signature import command
from ropecli.training.recipe_files import ShippedFile, find_file, recipe_files


@dataclass(frozen=True)
class RecipeList:
    """recipes: the listed files. single: whether the user asked for a single one. path: whether for paths."""

    recipes: tuple[ShippedFile, ...] = ()
    single: bool = False
    path: bool = False
    schema: dict[str, Any] | None = None

    def as_json(self) -> Any:
        if self.schema is not None:
            return self.schema
        listed = [
            {"name": file.name, "kind": file.kind, "summary": file.summary, "path": str(file.path)}
            for file in self.recipes
        ]
        return {**listed[0], "text": self.recipes[0].text} if self.single else listed


@command
def recipe(
    name: Annotated[str | None, Doc("The file to print. Default: list all.")] = None,
    *,
    path: Annotated[bool, Doc("Print the path instead.")] = False,
    schema: Annotated[bool, Doc("Print the JSON schema of recipes, for editors.")] = False,
) -> RecipeList:
    """List recipes, launch configurations and jobs, or print one."""
    if not schema:
        files = recipe_files("finetune", "accelerate")
        return RecipeList(tuple(files.values()) if name is None else (find_file(name, files),), name is not None, path)
    if name is not None or path:
        raise RecipeError("All recipes have the same schema. Use --schema without NAME and --path.")
    from ropecli.training.recipe_schema import recipe_schema

    return RecipeList(schema=recipe_schema())
