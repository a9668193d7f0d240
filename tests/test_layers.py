"""The layers of the package. Imports inside functions and for type checkers count as those at the top do."""

import ast
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "ropecli"

# From the ground up. A room imports only from lower lines. The files on the ground floor import each other.
LAYERS = [
    {
        "errors",
        "version",
        "rope",
        "demo",
        "atomic",
        "hashing",
        "messages",
        "names",
        "options",
        "ranks",
        "resume",
        "signals",
        "signature",
        "table",
        "yaml12",
    },
    {"scaling"},
    {"remapping", "analysis"},
    {"config"},
    {"checkpoint"},
    {"live"},
    {"data", "attention"},
    {"evaluation", "engines"},
    {"training"},
    {"extension"},
    {"reporting"},
    {"commands", "integrations"},
    {"cli"},
    {"__main__"},
]
HEIGHT = {room: height for height, layer in enumerate(LAYERS) for room in layer}

MODEL_LIBRARIES = {"torch", "transformers", "accelerate", "peft", "datasets"}
# The rooms that load torch with them, because a model goes through their hands; the rest of the model libraries,
# slower still, are loaded inside functions everywhere.
TOUCHES_MODELS = ["live", "attention", "evaluation", "training", "extension"]
# Numbers, JSON and files: a model library may not be named here even inside a function.
TOUCHES_NONE = [*LAYERS[0], "scaling", "remapping", "analysis", "config", "checkpoint", "engines", "reporting"]
MATHEMATICS = ["rope", "errors", "version", "scaling", "remapping", "analysis"]


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__") or "__init__"


MODULES = {module_name(path): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


def imports(tree: ast.AST, *, anywhere: bool) -> set[str]:
    """Dotted names of what the module imports when it is loaded; anywhere: also in functions and for type checkers."""
    found = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif anywhere or not (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        ):
            found |= imports(node, anywhere=anywhere)
    return found


def own_imports(name: str) -> set[str]:
    """Our modules that this one imports anywhere, without the package's name."""
    found = set()
    for imported in imports(MODULES[name], anywhere=True):
        first, _, rest = imported.partition(".")
        if first == "ropecli":
            # of `ropecli.scaling.spec.ScalingSpec` the longest part that is a module
            while rest and rest not in MODULES:
                rest = rest.rpartition(".")[0]
            found.add(rest or "__init__")
    return found - {name}


def libraries(name: str, *, anywhere: bool) -> set[str]:
    return {imported.partition(".")[0] for imported in imports(MODULES[name], anywhere=anywhere)}


def below(parts: list[str]) -> list[str]:
    return [name for name in MODULES if any(name == part or name.startswith(f"{part}.") for part in parts)]


def part_of(name: str) -> str:
    return name.partition(".")[0]


def outside(*parts: str) -> list[str]:
    return [name for name in MODULES if part_of(name) not in parts]


def test_imports_go_down():
    def below_it(part: str, other: str) -> bool:
        return other == part or HEIGHT[other] < HEIGHT[part] or HEIGHT[part] == 0 == HEIGHT[other]

    wrong = [
        f"{name} imports {imported}, which is not below it"
        for name in outside("__init__")
        for imported in own_imports(name)
        if not below_it(part_of(name), part_of(imported))
    ]
    assert wrong == []


def test_model_libraries_are_loaded_when_a_model_is_touched():
    for name in MODULES:
        allowed = {"torch"} if name in below(TOUCHES_MODELS) else set()
        allowed |= {"transformers"} if name == "integrations" else set()  # a subclass of its TrainerCallback
        assert libraries(name, anywhere=False) & MODEL_LIBRARIES <= allowed, name


def test_what_touches_no_model_names_no_model_library():
    for name in below(TOUCHES_NONE):
        assert not libraries(name, anywhere=True) & MODEL_LIBRARIES, name


def test_the_mathematics_need_numpy_alone():
    for name in below(MATHEMATICS):
        others = libraries(name, anywhere=True) - {"numpy", "ropecli"} - set(sys.stdlib_module_names)
        assert not others, name


def test_only_commands_know_the_command_line_and_only_they_and_reports_render():
    for name in outside("cli"):
        assert not libraries(name, anywhere=True) & {"typer", "click", "argparse"}, name
    for name in outside("cli", "reporting"):
        assert "rich" not in libraries(name, anywhere=True), name


def test_nothing_runs_remote_code():
    """trust_remote_code is off wherever it is named."""
    for name, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert isinstance(node.value, ast.Constant), name
                assert node.value.value is False, name
