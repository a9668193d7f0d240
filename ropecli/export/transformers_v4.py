"""transformers 4: a config in the older dialect, as its releases 4.31.0 to 4.57.3 read it (modeling_rope_utils.py).

- linear and dynamic: 4.31.0 on; up to 4.42.4 rope_scaling may hold `type` and `factor` and nothing else.
- yarn, llama3, longrope: 4.43.0 on. yarn reads original_max_position_embeddings from 4.51.0 on (before, the raised
  window was taken for the pretraining one) and truncate from 4.55.0 on; 4.51 to 4.55 take the windows' ratio for
  the factor.
- longrope reads its pretraining window from the top of the config.
- Some types validate rope_scaling by rules of their own (families.py): OLMo wants two keys, Phi-3 wants three.
- Types with a rope for each layer type: gemma3's flat fields scale the layers that see the whole context, and
  rope_local_base_freq is the others' base; olmo3's are the same, with one base for all. Others know nothing of it.
"""

import math
from typing import Any

from ropecli.checkpoint.dialects import LOCAL_THETA, ORIGINAL_WINDOW, Parameters, rope_type_of
from ropecli.checkpoint.families import MSCALES, Family
from ropecli.errors import PatchError
from ropecli.export.engine import Export, engine, number, refusal
from ropecli.export.positions import Positions

_SINCE = {"linear": "4.31.0", "dynamic": "4.31.0", "llama3": "4.43.0", "longrope": "4.43.0"}
_TWO_FIELDS = ("linear", "dynamic")
_OUTSIDE = ("rope_theta", "partial_rotary_factor")
_LATER = "transformers 5 loads the folder as it is."


@engine("transformers-v4")
def transformers_v4(positions: Positions) -> Export:
    """`from_pretrained` with the older fields as keyword arguments."""
    _refuse_layer_types(positions)
    _refuse_by_family(positions)
    overrides = _overrides(positions)
    carried = _carried(positions, overrides)
    if positions.section is not None:
        raise _refusal(
            positions,
            f"the fields are under {positions.section}, which keyword arguments do not reach.",
            "config.json carries them already: give it the folder as it is."
            if carried
            else "Give it a folder that `ropecli patch` wrote: its config.json carries them.",
        )
    told = overrides if positions.revision is None else {"revision": positions.revision, **overrides}
    arguments = "".join(f", {key}={value!r}" for key, value in told.items())
    command = f"AutoModelForCausalLM.from_pretrained({positions.checkpoint!r}{arguments})"
    notes = ["config.json carries these fields already; the line is for a copy that lacks them."] if carried else []
    return Export(
        "transformers-v4", command, overrides, tuple(_cannot(positions, overrides)), (*positions.warnings, *notes)
    )


def _refusal(positions: Positions, reason: str, next_step: str) -> PatchError:
    return refusal(positions, "transformers 4", reason, next_step)


def _refuse_layer_types(positions: Positions) -> None:
    if not positions.nested:
        return
    if not positions.family.flat_means_full:
        raise _refusal(
            positions, f"the older fields of {positions.model_type} know no parameters by layer type.", _LATER
        )
    if any(one["rope_type"] != "default" for one in positions.others):
        raise _refusal(
            positions,
            "the older fields scale the layers that see the whole context alone, and here others are scaled.",
            f"Patch without --layer-types. {_LATER}",
        )
    if not _has_local_base(positions.family) and any(
        one["rope_theta"] != positions.main["rope_theta"] for one in positions.others
    ):
        raise _refusal(
            positions,
            f"the older fields of {positions.model_type} know one base for all layers, and here they differ.",
            "Patch by a method that keeps rope_theta: yarn, linear or llama3.",
        )


def _refuse_by_family(positions: Positions) -> None:
    family, rope_type = positions.family, positions.rope_type
    if family.bare_longrope and rope_type == "longrope" and MSCALES[0] in positions.main:
        raise _refusal(
            positions,
            f"{positions.model_type} there works out the attention factor from the two windows, and takes no "
            f"{positions.rope.attention_factor:.5g} in its place.",
            "Patch by ntk or abf, or by longrope without an attention factor of its own.",
        )
    if family.two_fields and rope_type not in ("default", *_TWO_FIELDS):
        raise _refusal(
            positions,
            f"{positions.model_type} there takes `type` and `factor` and nothing else, linear or dynamic; this folder "
            f"has rope_type {rope_type!r}.",
            "Patch by linear, dynamic, ntk or abf.",
        )


def _has_local_base(family: Family) -> bool:
    return len({defaults.get("rope_theta") for defaults in family.layers.values()}) > 1


def _overrides(positions: Positions) -> dict[str, Any]:
    main, rope_type = positions.main, positions.rope_type
    # dynamic takes max_position_embeddings for its pretraining window
    window = positions.original_window if rope_type == "dynamic" else positions.window
    overrides: dict[str, Any] = {
        "rope_theta": main["rope_theta"],
        "rope_scaling": _rope_scaling(positions),
        positions.window_key: window,
    }
    if rope_type == "longrope":
        overrides[ORIGINAL_WINDOW] = positions.original_window
    if "partial_rotary_factor" in main:
        overrides["partial_rotary_factor"] = main["partial_rotary_factor"]
    if positions.others and _has_local_base(positions.family):
        overrides[LOCAL_THETA] = positions.others[0]["rope_theta"]
    return overrides


def _rope_scaling(positions: Positions) -> Parameters | None:
    main, rope_type = positions.main, positions.rope_type
    if rope_type == "default":
        return None
    if rope_type in _TWO_FIELDS:  # all that releases up to 4.42.4 let pass, and OLMo to this day
        return {"type": rope_type, "factor": float(main["factor"])}
    if positions.family.bare_longrope:
        return {"type": rope_type, "short_factor": main["short_factor"], "long_factor": main["long_factor"]}
    return {key: value for key, value in main.items() if key not in _OUTSIDE}


def _carried(positions: Positions, overrides: dict[str, Any]) -> bool:
    """Whether config.json says the same in the same fields."""
    return all(_comparable(positions.fields.get(key)) == _comparable(value) for key, value in overrides.items())


def _comparable(value: Any) -> Any:
    """A rope_scaling without what may stand in it twice, or beside it as well."""
    if not isinstance(value, dict):
        return value
    plain = {key: one for key, one in value.items() if key not in ("type", *_OUTSIDE)}
    return {**plain, "rope_type": rope_type_of(value)}


def _cannot(positions: Positions, overrides: dict[str, Any]) -> list[str]:
    return [
        *_before_its_time(positions),
        *(
            f"config.json has no {key} at its top, and a config class that does not know it either refuses it as a "
            "keyword argument. A folder that `ropecli patch` writes has it there."
            for key in (ORIGINAL_WINDOW, "partial_rotary_factor")
            if key in overrides and key not in positions.fields
        ),
    ]


def _before_its_time(positions: Positions) -> list[str]:
    """What earlier releases do."""
    if positions.rope_type == "yarn":
        sentences = [
            "Releases before 4.51.0 take the raised window for the pretraining one, and so put YaRN's ramp wrong."
        ]
        ratio = positions.window / positions.original_window
        if not math.isclose(ratio, positions.factor):
            sentences.append(
                f"Releases 4.51 to 4.55 take the windows' ratio, {number(ratio)}, for YaRN's factor, which is "
                f"{number(positions.factor)}."
            )
        if positions.main.get("truncate") is False:
            sentences.append("Releases before 4.55.0 do not read truncate.")
        return sentences
    if positions.rope_type != "default":
        return [f"Releases before {_SINCE[positions.rope_type]} do not know rope_type {positions.rope_type!r}."]
    return []
