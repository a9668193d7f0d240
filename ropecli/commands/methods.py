"""`ropecli methods`: lists or explains the scaling methods."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from annotated_doc import Doc

from ropecli.options import IS_METHOD
from ropecli.signature import command

if TYPE_CHECKING:
    from ropecli.scaling.method import ScalingMethod


@dataclass(frozen=True)
class MethodList:
    """methods: the listed methods. single: whether the user asked for a single one."""

    methods: "tuple[ScalingMethod, ...]"
    single: bool = False

    def as_json(self) -> Any:
        listed = [_as_json(method) for method in self.methods]
        return listed[0] if self.single else listed


@command
def methods(
    method: Annotated[str | None, Doc("The method to explain. Default: list all."), IS_METHOD] = None,
) -> MethodList:
    """List the scaling methods, or explain one."""
    from ropecli.scaling.registry import find_method, scaling_methods

    if method is None:
        return MethodList(tuple(scaling_methods().values()))
    return MethodList((find_method(method),), single=True)


def written_as(method: "ScalingMethod") -> str:
    """The rope_type in config.json; 'attention' for distance methods; 'live only' if config.json cannot express it."""
    if method.rope_type is not None:
        return method.rope_type
    if method.remaps:
        return "attention"
    return "live only" if method.depends_on_length else "longrope"


def example(method: "ScalingMethod") -> str:
    """Return a command that uses the method."""
    from ropecli.scaling.method import LIST

    factor = 1 if method.remaps and not method.uses_factor else 4
    if written_as(method) == "live only":
        return f"ropecli eval-ppl CHECKPOINT --data SOURCE --methods {method.name} --factors {factor}"
    use = f"--method {method.name} --factor {factor}"
    if any(parameter.kind == LIST for parameter in method.parameters):
        use += " --factors-file FILE.json"
    elif "abf" in method.name.split("+"):  # which needs a setting
        use += " --set rope_theta=500000"
    return f"ropecli patch CHECKPOINT {use} --output DIR"


_KEYS = ("name", "summary", "description", "source", "g", "h", "interpolation", "training", "rope_type")


def _as_json(method: "ScalingMethod") -> dict[str, Any]:
    return {
        **{key: getattr(method, key) for key in _KEYS},
        "written_as": written_as(method),
        "depends_on_length": method.depends_on_length,
        "other_names": list(method.other_names),
        "parameters": [parameter._asdict() for parameter in method.parameters],
        "example": example(method),
    }
