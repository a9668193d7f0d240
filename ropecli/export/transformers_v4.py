"""transformers 4: a config in the older dialect, as its releases 4.31.0 to 4.57.3 read it (modeling_rope_utils.py).

- linear and dynamic: 4.31.0 on; up to 4.42.4 rope_scaling may hold `type` and `factor` and nothing else.
- yarn, llama3, longrope: 4.43.0 on. yarn reads original_max_position_embeddings from 4.51.0 on (before, the raised
  window was taken for the pretraining one) and truncate from 4.55.0 on; 4.51 to 4.55 take the windows' ratio for
  the factor.
- longrope reads its pretraining window from the top of the config.
"""

from typing import Any

from ropecli.checkpoint.dialects import ORIGINAL_WINDOW
from ropecli.errors import PatchError
from ropecli.export.engine import Export, engine, refusal
from ropecli.export.positions import Positions

_SINCE = {"default": "4.0", "linear": "4.31.0", "dynamic": "4.31.0", "llama3": "4.43.0", "longrope": "4.43.0"}
# Types with a rope for each layer type whose older, flat fields mean the layers that see the whole context.
_FLAT_MEANS_FULL = ("gemma3_text", "gemma3n_text", "olmo3")
_OUTSIDE = ("rope_theta", "partial_rotary_factor")


@engine("transformers-v4")
def transformers_v4(positions: Positions) -> Export:
    """`from_pretrained` with the older fields as keyword arguments."""
    _refuse(positions)
    overrides = _overrides(positions)
    arguments = "".join(f", {key}={value!r}" for key, value in overrides.items())
    command = f"AutoModelForCausalLM.from_pretrained({positions.checkpoint!r}{arguments})"
    return Export("transformers-v4", command, overrides, tuple(_cannot(positions)), tuple(_notes(positions)))


def _refuse(positions: Positions) -> None:
    def cannot(reason: str) -> PatchError:
        next_step = "What ropecli wrote for older readers is in config.json: give it the folder as it is."
        return refusal(positions, "transformers 4", reason, next_step)

    if positions.section is not None:
        raise cannot(f"the fields are under {positions.section}, which keyword arguments do not reach.")
    if positions.nested and positions.model_type not in _FLAT_MEANS_FULL:
        raise cannot(f"the older fields know no parameters by layer type, except for {', '.join(_FLAT_MEANS_FULL)}.")


def _overrides(positions: Positions) -> dict[str, Any]:
    main, rope_type = positions.main, positions.rope_type
    scaling = {key: value for key, value in main.items() if key not in _OUTSIDE}
    if rope_type in ("linear", "dynamic"):
        scaling = {"type": rope_type, "factor": float(main["factor"])}  # all that releases up to 4.42.4 let pass
    # dynamic takes max_position_embeddings for its pretraining window
    window = positions.original_window if rope_type == "dynamic" else positions.window
    overrides: dict[str, Any] = {
        "rope_theta": main["rope_theta"],
        "rope_scaling": None if rope_type == "default" else scaling,
        positions.window_key: window,
    }
    if rope_type == "longrope":
        overrides[ORIGINAL_WINDOW] = positions.original_window
    if "partial_rotary_factor" in main:
        overrides["partial_rotary_factor"] = main["partial_rotary_factor"]
    if positions.model_type.startswith("gemma3"):
        label = positions.rope.geometry.layer_type
        local = next(one for key, one in positions.parameters.items() if key != label and one)
        overrides["rope_local_base_freq"] = local["rope_theta"]
    return overrides


def _cannot(positions: Positions) -> list[str]:
    if positions.rope_type == "yarn":
        ramp = "Releases before 4.51.0 take the raised window for the pretraining one, and so put YaRN's ramp wrong."
        untruncated = positions.main.get("truncate") is False
        return [ramp, "Releases before 4.55.0 do not read truncate."] if untruncated else [ramp]
    if positions.rope_type != "default":
        return [f"Releases before {_SINCE[positions.rope_type]} do not know rope_type {positions.rope_type!r}."]
    return []


def _notes(positions: Positions) -> list[str]:
    written = "A folder that ropecli wrote carries these fields already; the line is for a copy that lacks them."
    return [*positions.warnings, written]
