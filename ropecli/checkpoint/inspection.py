"""The reports of `ropecli inspect` and `ropecli theory`."""

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ropecli.analysis.base_bound import LONGEST_BOUNDED, smallest_base
from ropecli.analysis.summary import critical_dimension, summarize
from ropecli.checkpoint.advice import how_to_read
from ropecli.checkpoint.files import CONFIG, PROVENANCE
from ropecli.checkpoint.lint import find_faults
from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.patch_plan import make_plan
from ropecli.checkpoint.provenance import patch_command
from ropecli.checkpoint.state import CheckpointState, read_state
from ropecli.config.fields import is_drafter
from ropecli.config.findings import MISREAD, Finding
from ropecli.config.layers import COMPRESSED, RECURRENT, SPARSE, Layer, acts_nowhere, kv_cache_bytes, limit_of_far
from ropecli.scaling.spec import ScaledRope, ScalingSpec, make_spec


def inspect_checkpoint(
    state: CheckpointState, layers: Sequence[Layer] | None = None, reading: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The report of `ropecli inspect`. Top-level fields describe the main rope; `ropes` has all of them.

    Lengths, windows and wavelengths in tokens. pretraining_length: as the makers say, or config.json;
    pretraining_length_source says which; config_pretraining_length: of config.json alone. makers_extension: the scaling
    that the makers publish, with its source, or null. inv_freq in radians per token.
    layers: one entry per kind, null for what is unknown; the argument has them as a probe found them, default: as
    config.json says. limits: sentences about what limits the
    length. kv_cache_bytes: at the context length, in bfloat16; per token at the start, and beyond the windows; null for
    encoders, or if unknown. reading: whether stock transformers builds the same rotary tables from config.json,
    `verdict` and `message`; the argument, default: null.
    findings: problems found, each with a rule, a message, a fix, and whether it changes what is computed.
    """
    layers = state.settings.layers if layers is None else layers
    checkpoint, positions, length = state.checkpoint, state.positions, state.positions.context_length
    main = {key: value for key, value in _describe(positions.main).items() if key != "layer_type"}
    tokenizer = checkpoint.tokenizer_config or {}
    findings, makers = find_faults(state), state.before.known_makers
    if reading and reading["verdict"] == MISREAD:
        findings.insert(0, Finding(MISREAD, reading["message"]))
    return {
        "checkpoint": checkpoint.name,
        "model_type": checkpoint.config.get("model_type"),
        "pretraining_length": positions.pretraining_length,
        "pretraining_length_source": PROVENANCE if state.note else makers.source if makers else CONFIG,
        "config_pretraining_length": state.before.config_length,
        "max_position_embeddings": state.settings.max_position_embeddings,
        "context_length": length,
        "makers_extension": _extension(state),
        "tokenizer_model_max_length": tokenizer.get("model_max_length"),
        **main,
        "remaps": positions.main.remapping is not None,
        "ropes": [_describe(rope) for rope in positions.ropes.values()],
        "layers": _kinds_of(layers, positions.ropes),
        "limits": list(_limits(state, layers)),
        **_kv_cache(state, layers, length),
        "reading": reading and dict(reading),
        "findings": [finding.as_json() for finding in findings],
    }


def _kinds_of(layers: Sequence[Layer], ropes: Mapping[str | None, ScaledRope]) -> list[dict[str, Any]]:
    """One entry per kind of layer, the most frequent first."""
    kinds: list[dict[str, Any]] = []
    for layer, count in Counter(layers).most_common():
        rope = ropes.get(layer.rope) if layer.rotates else None
        kind = {"count": count, "attention": layer.attention, "window": layer.window, "rotates": layer.rotates}
        kinds.append({**kind, "sees_whole_context": layer.far, "layer_type": layer.rope})
        if rope:
            scaling = {"rope_theta": rope.rope_theta, "method": rope.spec.method.name, "factor": rope.spec.factor}
            kinds[-1].update(scaling)
    return kinds


def _kv_cache(state: CheckpointState, layers: Sequence[Layer], length: int) -> dict[str, int | None]:
    keys = ("kv_cache_bytes_per_token", "kv_cache_bytes_per_token_beyond_windows", "kv_cache_bytes")
    if any(str(name).endswith("ForMaskedLM") for name in state.checkpoint.config.get("architectures") or ()):
        return dict.fromkeys(keys)  # an encoder
    section, family = state.section, state.settings.family
    first, before, full = (kv_cache_bytes(section, family, layers, tokens) for tokens in (1, length - 1, length))
    return dict(zip(keys, (first, None if full is None or before is None else full - before, full), strict=True))


def _limits(state: CheckpointState, layers: Sequence[Layer]) -> Iterator[str]:
    """Sentences on the limits of the length, and the advice that follows."""
    count = Counter(layer.attention for layer in layers)
    yield _limit_of_positions(state, layers)
    if default := state.settings.default_base:
        yield default
    if count[RECURRENT]:
        yield f"No scaling changes the {count[RECURRENT]} recurrent layers, which have no positions."
    if chosen := next((layer.window for layer in layers if layer.attention == SPARSE and layer.window), None):
        yield (
            f"{count[SPARSE]} layers read {chosen} tokens that an indexer chooses, which was trained on the same "
            "lengths: measure longer contexts, for example with `ropecli ruler`."
        )
    if count[COMPRESSED]:
        yield (
            f"{count[COMPRESSED]} layers read distant tokens compressed, several as one: measure longer contexts, for "
            "example with `ropecli ruler`."
        )
    if any("mrope_section" in (state.section.get(key) or {}) for key in ("rope_parameters", "rope_scaling")):
        yield "The positions of an image grow more slowly than its tokens (mrope): images reach further than text."
    if is_drafter(state.checkpoint.config):
        yield (
            "It drafts tokens for another model, at that model's positions: patch it with the same --method and "
            "--factor, and with that model's pretraining length as --original-length."
        )


def _limit_of_positions(state: CheckpointState, layers: Sequence[Layer]) -> str:
    name, positions, family = shlex.quote(state.checkpoint.name), state.positions, state.settings.family
    unknown = any(layer.attention is None for layer in layers)
    trained, scaling = f"pretrained on {positions.pretraining_length} tokens", positions.main.spec
    if state.before.guesses_pretraining_length:
        trained = f"scaled by {scaling.method} ×{scaling.factor:g} from a pretraining length that config.json lacks"
    elif state.before.overruled_by:
        trained += f", and scaled by {scaling.method} ×{scaling.factor:g}, which is not the makers'"
    elif scaling.method.name != "none" and scaling.factor > 1:
        trained += f" and scaled to {positions.context_length} by {scaling.method} ×{scaling.factor:g}"
    if unknown and not family.known:
        return (
            f"transformers has no model type {family.model_type}, so what its layers see and which of them rotate is "
            "not known, and patch works only with --no-verify."
        )
    if unknown:
        return (
            "config.json does not say which layers see the whole context. `ropecli inspect "
            f"{name} --probe` runs a small model of this type to find out."
        )
    if nowhere := acts_nowhere(layers):
        return nowhere
    if limit := limit_of_far(layers):
        return f"{limit[0].upper()}{limit[1:]}, {trained}. A scaling changes these alone.{_advice(state)}"
    rotating = sum(layer.far for layer in layers)
    return f"The rotary positions of {rotating} layers limit the length: {trained}.{_advice(state)}"


def _advice(state: CheckpointState) -> str:
    """The command that extends the length, unless the makers have their own."""
    spec, positions = state.positions.main.spec, state.positions
    if spec.method.name != "none" and spec.factor > 1:
        return " A patch replaces this scaling."
    # a length beyond the pretraining length without a scaling is the makers' own way to extend
    if _extension(state) is not None or positions.context_length > positions.pretraining_length:
        return ""
    advice = how_to_read(state, 2 * positions.context_length)
    return f" {advice}" if advice else ""


def _extension(state: CheckpointState) -> dict[str, Any] | None:
    """The makers' scaling, for a checkpoint that has none yet."""
    makers = state.before.makers
    if makers is None or makers.extension is None:
        return None
    method, factor, source, trained = makers.extension
    return {
        "method": method,
        "factor": factor,
        "original_max_position_embeddings": makers.pretraining_length,
        "context_length": round(makers.pretraining_length * factor),
        "needs_training": trained,
        "source": source,
        "command": patch_command(state.checkpoint.name, None, method, factor),
    }


def differences(reports: Sequence[dict[str, Any]]) -> list[str]:
    """The fields in which the reports of several checkpoints differ, except names and lists of numbers.

    Also compares ropes of the same layer type, if both checkpoints have the same layer types.
    """
    ignored = {"checkpoint", "inv_freq", "ropes", "layers", "limits", "findings", "makers_extension"}
    base = reports[0]

    def differ(report: dict[str, Any], key: str) -> bool:
        before, after = ({rope["layer_type"]: rope.get(key) for rope in side["ropes"]} for side in (base, report))
        return base[key] != report[key] or (before.keys() == after.keys() and before != after)

    return [key for key in base if key not in ignored and any(differ(report, key) for report in reports[1:])]


def _describe(rope: ScaledRope) -> dict[str, Any]:
    geometry = rope.geometry
    finite = rope.wavelength[np.isfinite(rope.wavelength)]
    return {
        "layer_type": geometry.layer_type,
        "head_dim": geometry.head_dim,
        "rotary_dim": geometry.rotary_dim,
        "rope_theta": rope.rope_theta,
        "original_max_position_embeddings": geometry.original_max_position_embeddings,
        "method": rope.spec.method.name,
        "factor": rope.spec.factor,
        "params": {**rope.spec.params, **(rope.remapping.params if rope.remapping else {})},
        "attention_factor": rope.attention_factor,
        "shortest_wavelength": float(finite.min()) if finite.size else None,
        "longest_wavelength": float(finite.max()) if finite.size else None,
        "pairs": len(rope.inv_freq),
        "pairs_rotating_in_pretraining_length": critical_dimension(geometry) // 2,
        "inv_freq": rope.inv_freq.tolist(),
    }


PRETRAINED = "pretrained"


def compared_ropes(
    checkpoint: Checkpoint, specs: Sequence[ScalingSpec | None] = (None,), original_length: int | None = None
) -> tuple[dict[str, ScaledRope], int, tuple[Finding, ...]]:
    """The ropes of a checkpoint with the scalings `specs`; None means the checkpoint unchanged.

    Returns the ropes of the layers that see the whole context, by name, the pretrained one first; the target, the
    longest of their target lengths, tokens; and findings. original_length: overrides the pretraining length in
    config.json, for methods only. Raises MethodError, CheckpointError.
    """
    ropes: dict[str, ScaledRope] = {}
    findings: list[Finding] = []
    target = 0
    for spec in specs:
        if spec is None:
            state = read_state(checkpoint)
            positions = state.positions
            findings += state.findings
        else:
            plan = make_plan(checkpoint, spec, original_length=original_length, in_memory=True)
            positions = plan.positions
            findings += plan.findings_in_memory
        rope = positions.main
        if rope.spec.method.name != "none":
            name = rope.spec.label
            ropes[f"{name}, as it is" if spec is None else name] = rope
        target = max(target, positions.context_length)
        unscaled = ScaledRope(rope.geometry, make_spec("none"), rope.geometry.inv_freq())
    return {PRETRAINED: unscaled, **ropes}, target, tuple(dict.fromkeys(findings))


def theory_report(
    name: str, ropes: Mapping[str, ScaledRope], target: int, findings: Sequence[Finding]
) -> dict[str, Any]:
    """The report of `ropecli theory`: summarize() of every rope, and its method in YaRN's general form.

    supported_length: for the pretrained frequencies, the largest distance before the first negative score, null if
    none was found. smallest_base: of the pretrained geometry for the target; infinite if there is none, null for
    targets above base_bound.LONGEST_BOUNDED.
    """
    geometry = ropes[PRETRAINED].geometry
    summaries = {label: summarize(rope, target) for label, rope in ropes.items()}
    negative = summaries[PRETRAINED]["first_negative_score"]
    return {
        "checkpoint": name,
        "original_max_position_embeddings": geometry.original_max_position_embeddings,
        "target_length": target,
        "supported_length": None if negative is None else negative - 1,
        "smallest_base": smallest_base(geometry, target) if target <= LONGEST_BOUNDED else None,
        "ropes": [
            {
                "name": label,
                **{key: getattr(rope.spec.method, key) for key in ("g", "h", "interpolation")},
                **summaries[label],
            }
            for label, rope in ropes.items()
        ],
        "findings": [finding.as_json() for finding in findings],
    }
