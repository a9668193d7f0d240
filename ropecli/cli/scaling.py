"""The options that name scaling methods, and what they mean: patch, the evaluations and the theory share them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

if TYPE_CHECKING:
    from ropecli.scaling.spec import ScalingSpec

Factor = Annotated[float | None, typer.Option(help="Target length ÷ pretraining length.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A parameter of the method; repeatable.")
]
SeveralSettings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="[METHOD.]KEY=VALUE", help="A parameter of one of the methods; repeatable."),
]
FactorsFile = Annotated[
    Path | None,
    typer.Option(
        help="Numbers for longrope or custom: a JSON list of factors, or an object with long_factor, factors or "
        "inv_freq; for longrope also a config.json that has them."
    ),
]
InMemory = Annotated[
    str | None,
    typer.Option("--method", "-m", help="Patch the model in memory, by a method of `ropecli methods`; with --factor."),
]
OriginalLength = Annotated[
    int | None, typer.Option(min=1, help="The true pretraining length, where config.json names another.")
]
AS_IS = "as-is"
_LISTS = {"longrope": "long_factor", "custom": "factors"}
"""The parameter that a plain list in a factors file stands for."""
_NEEDS_FACTOR = "{} needs --factor, as --factor 4."


def parameters(method: str, settings: list[str] | None, factors_file: Path | None) -> dict[str, Any]:
    """The method's parameters from --set and --factors-file. Raises MethodError."""
    from ropecli.cli.terminal import parse_settings

    return {**_read_factors(method, factors_file), **parse_settings(settings)}


def method_specs(
    methods: str, factors: list[float], settings: list[str] | None, factors_file: Path | None = None
) -> list["ScalingSpec | None"]:
    """Every method at every factor, before them None for `as-is`. Raises MethodError.

    methods: with commas between. factors: none where all that is asked for is `as-is` and `none`. settings: of one
    method alone KEY=VALUE, of several METHOD.KEY=VALUE. factors_file: for those that take a list of numbers.
    """
    from ropecli.cli.terminal import parse_settings
    from ropecli.errors import MethodError
    from ropecli.scaling.registry import find_method
    from ropecli.scaling.spec import ScalingSpec, make_spec

    asked = [name.strip() for name in methods.split(",") if name.strip()]
    if not asked:
        raise MethodError("The list of methods names no method; `ropecli methods` shows them all.")
    names = list(dict.fromkeys(find_method(name).name for name in asked if name != AS_IS))
    params = _sorted_by_method(names, AS_IS in asked, parse_settings(settings))
    for name in _takers(names, factors_file):
        params[name] = {**_read_factors(name, factors_file), **params[name]}
    if not factors and (needy := [name for name in names if name != "none"]):
        raise MethodError(_NEEDS_FACTOR.format(needy[0]))
    specs: list[ScalingSpec | None] = [None] if AS_IS in asked else []
    return specs + [make_spec(name, factor, params[name]) for name in names for factor in factors or [1.0]]


def study_specs(
    methods: str | None,
    factor: float | None,
    settings: list[str] | None,
    factors_file: Path | None,
    original_length: int | None,
) -> list["ScalingSpec | None"]:
    """The same at one factor; without methods the checkpoint as it is. Raises MethodError."""
    if methods is None:
        refuse_without_method(factor, settings or None, factors_file, original_length)
        return [None]
    specs = method_specs(methods, [] if factor is None else [factor], settings, factors_file)
    if specs == [None]:
        refuse_without_method(factor, factors_file, original_length)
    return specs


def _sorted_by_method(names: list[str], as_is: bool, settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The parameters of each method. Raises MethodError for one of a method that is not asked for."""
    from ropecli.errors import MethodError

    params: dict[str, dict[str, Any]] = {name: {} for name in names}
    for key, value in settings.items():
        method, dot, parameter = key.partition(".")
        if not dot and len(names) == 1:
            method, dot, parameter = names[0], ".", key
        if not dot or method not in params:
            if not names or (dot and method == AS_IS and as_is):
                raise MethodError(f"--set {key}=...: a checkpoint as it is has no parameters to set.")
            raise MethodError(f"--set {key}=...: it has the form METHOD.KEY=VALUE, for one of {', '.join(names)}.")
        params[method][parameter] = value
    return params


def _takers(names: list[str], factors_file: Path | None) -> list[str]:
    """Whom the file of factors is for: at least one, which may refuse it."""
    from ropecli.errors import MethodError

    if factors_file is None:
        return []
    if not names:
        raise MethodError(f"--factors-file {factors_file}: a checkpoint as it is takes no numbers.")
    return [name for name in names if name in _LISTS] or names[:1]


def refuse_without_method(*given: object) -> None:
    """Raises MethodError where one of the values, of options that mean nothing for a checkpoint as it is, is given."""
    from ropecli.errors import MethodError

    if any(value is not None for value in given):
        raise MethodError("--factor, --set, --factors-file and --original-length are for a --method.")


class Subject(NamedTuple):
    """A checkpoint to measure. spec: the scaling to report. rope: what it gives. plan: to patch by, in memory; None for
    the checkpoint as it is.
    """

    checkpoint: Any
    spec: Any
    rope: Any
    plan: Any
    warnings: tuple[str, ...]


def planned(
    checkpoint,
    method: str | None = None,
    factor: float | None = None,
    params: dict[str, Any] | None = None,
    original_length: int | None = None,
) -> Subject:
    """Without a method, the checkpoint as it is. Raises MethodError."""
    from ropecli.checkpoint.patch_plan import make_plan
    from ropecli.checkpoint.state import read_state
    from ropecli.errors import MethodError
    from ropecli.scaling.spec import make_spec

    if method is None:
        refuse_without_method(factor, params or None, original_length)
        state = read_state(checkpoint)
        return Subject(checkpoint, state.main.spec, state.main, None, state.warnings)
    if factor is None and method != "none":
        raise MethodError(_NEEDS_FACTOR.format(method))
    spec = make_spec(method, 1.0 if factor is None else factor, params or {})
    plan = make_plan(checkpoint, spec, original_length=original_length)
    return Subject(checkpoint, plan.spec, plan.ropes[plan.scaled[0]], plan, plan.scaling_warnings)


def refuse_attention(checkpoint, plan, attn: str) -> None:
    """Raises MethodError where another attention was asked for than that of the method, which brings its own.

    plan: None for the checkpoint as it is. Raises CheckpointError for half of such a method in config.json.
    """
    from ropecli.config.saved_remapping import read_saved_remapping
    from ropecli.errors import MethodError

    saved = read_saved_remapping(checkpoint.config)
    if attn == "auto":
        return
    if plan is not None and any(rope.remapping for rope in plan.ropes.values()):
        raise MethodError(f"--attn is {attn!r}, and {plan.spec.method} is an attention of its own. Leave --attn out.")
    if saved is not None:
        raise MethodError(
            f"--attn is {attn!r}, and {checkpoint.name} attends by {saved.method}, which it would do away with. "
            "Leave --attn out."
        )


def fingerprint(plan) -> str | None:
    """sha256 of the ropes that a plan gives, to the bit; None for a checkpoint as it is."""
    import hashlib

    if plan is None:
        return None
    sha = hashlib.sha256()
    for label, rope in plan.ropes.items():
        sha.update(repr((label, rope.geometry, rope.spec, rope.attention_factor)).encode())
        if rope.remapping is not None:
            sha.update(repr((rope.remapping.params, rope.remapping.pretrained, rope.remapping.target)).encode())
        sha.update(rope.inv_freq.tobytes())
    return sha.hexdigest()


def patch_in_memory(model, plan) -> bool:
    """Whether the frequencies then follow the length. plan: None leaves the model as it is."""
    from ropecli.attention.patching import live_patch
    from ropecli.evaluation.comparison import plan_varies_with_length

    if plan is None:
        return False
    live_patch(model, plan.ropes)
    return plan_varies_with_length(plan)


def _read_factors(method: str, path: Path | None) -> dict[str, Any]:
    """A JSON object with the method's parameters, or a list of its factors."""
    import json

    from ropecli.checkpoint.files import LARGEST_JSON, read_bounded
    from ropecli.errors import MethodError

    if path is None:
        return {}
    if method not in _LISTS:
        raise MethodError(f"--factors-file is for {' and '.join(_LISTS)}; {method} takes no list of numbers.")
    try:
        value = json.loads(read_bounded(path, LARGEST_JSON))
    except (OSError, ValueError, RecursionError) as error:
        raise MethodError(f"{path} cannot be read as JSON: {error}") from error
    if isinstance(value, list):
        value = {_LISTS[method]: value}
    named = {"longrope": ("long_factor",), "custom": ("factors", "inv_freq")}[method]
    if isinstance(value, dict) and method == "longrope":
        value = _of_config(value) or value
    if not isinstance(value, dict) or not any(key in value for key in named):
        raise MethodError(f"{path} must hold a list of factors, or an object with {' or '.join(named)}.")
    return value


def _of_config(config: dict[str, Any]) -> dict[str, Any]:
    """The parameters of longrope that a config.json holds; empty where it is none, or scales otherwise."""
    from ropecli.config.settings import read_settings

    if not any(isinstance(config.get(key), dict) for key in ("rope_parameters", "rope_scaling", "text_config")):
        return {}
    ropes = read_settings(config).ropes
    return next((dict(rope.spec.params) for rope in ropes if rope.spec.method.name == "longrope"), {})
