"""Options: every number has a range, for the command line and Python alike; names and types are checked for Python."""

import inspect
import math
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Required, TypedDict, Unpack

import numpy as np
import pytest
from annotated_doc import Doc

import ropecli
from ropecli.errors import MethodError
from ropecli.signature import Default, Interval, MinLen, OneOf, Only, command


def types_of(annotation: object) -> set[object]:
    parts = typing.get_args(annotation)
    return {annotation}.union(*map(types_of, parts)) if parts else {annotation}


def notes_of(annotation: object) -> list[object]:
    """All notes, those of a list's items too."""
    notes = list(getattr(annotation, "__metadata__", ()))
    return notes + [note for part in typing.get_args(annotation) for note in notes_of(part)]


def test_every_number_has_a_range():
    """Or the recipe of finetune checks it, or the method."""
    elsewhere = {"steps", "batch_size", "gradient_accumulation", "learning_rate", "seed", "factor"}
    for name in ropecli.COMMANDS:
        for parameter in inspect.signature(getattr(ropecli, name)).parameters.values():
            if {int, float} & types_of(parameter.annotation):
                has_range = any(isinstance(note, Interval) for note in notes_of(parameter.annotation))
                assert has_range or parameter.name in elsewhere, (name, parameter.name)


def call(name: str, /, **options: object) -> object:
    """Call the command with placeholders for its other required parameters."""
    function = getattr(ropecli, name)
    required = {
        key: 4
        if {int, float} & types_of(parameter.annotation)
        else next((note.values[0] for note in notes_of(parameter.annotation) if isinstance(note, OneOf)), "x")
        for key, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty
    }
    return function(**{**required, **options})


CONDITIONAL = [
    pytest.param(name, parameter, note, id=f"{name} {parameter.name}")
    for name in ropecli.COMMANDS
    for parameters in [inspect.signature(getattr(ropecli, name)).parameters]
    for parameter in parameters.values()
    for note in notes_of(parameter.annotation)
    if isinstance(note, Only) and note.other in parameters
    if note.values or type(None) in types_of(parameters[note.other].annotation)  # elsewhere, it is always set
]


@pytest.mark.parametrize(("name", "parameter", "note"), CONDITIONAL)
def test_an_option_without_effect_is_refused(name, parameter, note):
    """Whatever another option takes its effect away: of a protocol, a mode, a level, a server."""
    kinds = types_of(parameter.annotation)
    value = {bool: True, int: 7, float: 7.5, str: "x"}[next(kind for kind in (bool, int, float, str) if kind in kinds)]
    value = {"x": 1} if Mapping in map(typing.get_origin, kinds) else value
    others = {"protocol": "prefix", "mode": "rank" if note.values == ("generate",) else "generate"}
    others |= {"level": next((level for level in ("grid", "search") if level not in note.values), None)}
    others |= dict.fromkeys(("methods", "endpoint", "engine", "device_map", "data", "plot", "output"))
    with pytest.raises(MethodError, match=r"^--[a-z-]+ (applies only to|has no effect without) --"):
        call(name, **{parameter.name: value, note.other: others[note.other]})


@pytest.mark.parametrize("name", ropecli.COMMANDS)
def test_a_wrong_type_is_a_type_error_that_names_the_parameter(name):
    for key, parameter in inspect.signature(getattr(ropecli, name)).parameters.items():
        kinds = types_of(parameter.annotation)
        wrong = "4" if {int, float} & kinds else 4
        for value in (object(), b"x", [None], wrong, 1 if bool in kinds else True):
            with pytest.raises(TypeError, match=rf"^{name}\(\): {key} is .*; expected "):
                call(name, **{key: value})


def test_what_type_checkers_do_not_see_is_named():
    with pytest.raises(TypeError, match=r"^got an unexpected keyword argument 'dtyp'"):
        call("eval_ppl", dtyp="float32")
    with pytest.raises(TypeError, match=r"^missing a required (keyword-only )?argument: 'data'"):
        ropecli.eval_ppl("demo")
    with pytest.raises(TypeError, match=r"^too many positional arguments"):
        ropecli.eval_ppl("demo", "demo")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "needle",
            {"depths": [0, math.nan]},
            "--depths has nan; expected a finite number of at least 0 and of at most 1.",
        ),
        ("needle", {"depths": []}, "--depths has 0 values; expected at least 1."),
        ("needle", {"lengths": [64, 0]}, "--lengths has 0; expected a number of at least 1 and of at most 16777216."),
        ("finetune", {"learning_rate": math.inf}, "--learning-rate is inf; expected a finite number."),
        (
            "ruler",
            {"samples": 10**11},
            f"--samples is {10**11}; expected a number of at least 1 and of at most 1000000.",
        ),
    ],
)
def test_a_message_names_option_value_and_range(name, options, message):
    with pytest.raises(MethodError, match=rf"^{re.escape(message)}$"):
        call(name, **options)


def test_the_values_of_options_are_all_that_there_are():
    from ropecli.engines.engine_export import ENGINES
    from ropecli.evaluation.needle_prompts import STYLES
    from ropecli.evaluation.ruler_tasks import TASKS

    for name, option, known in (("export", "engine", ENGINES), ("ruler", "tasks", TASKS), ("needle", "style", STYLES)):
        annotation = inspect.signature(getattr(ropecli, name)).parameters[option].annotation
        assert [set(note.values) for note in notes_of(annotation) if isinstance(note, OneOf)] == [set(known)]


class Group(TypedDict, total=False):
    length: Required[Annotated[int, Doc("Tokens.")]]
    sizes: Annotated[Sequence[float] | None, Default(None), MinLen(1), Doc("Sizes.")]
    name: Annotated[str, Default("x"), Doc("Name.")]


@command
def example(*, on: Annotated[bool, Doc("On.")] = False, **shared: Unpack[Group]) -> dict[str, object]:
    return {"on": on, **shared}


def test_a_command_gets_all_options_of_its_groups(tmp_path):
    assert example(length=3) == {"on": False, "length": 3, "sizes": None, "name": "x"}
    assert list(inspect.signature(example).parameters) == ["on", "length", "sizes", "name"]
    values = example(length=np.int64(3), sizes=(np.float32(0.5), 2), name=tmp_path)
    assert values == {"on": False, "length": 3, "sizes": [0.5, 2.0], "name": str(tmp_path)}
    assert [type(value) for value in (values["length"], *values["sizes"])] == [int, float, float]
    with pytest.raises(MethodError, match="--sizes has 0 values; expected at least 1"):
        example(length=3, sizes=[])
