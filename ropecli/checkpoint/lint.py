"""What in a checkpoint's files is read otherwise than it looks, or by nobody: findings, each with its mend.

Each rule names a trap that stock readers fall into without a word. Rules read config.json as it stands; they change
nothing, and what they cannot tell they leave alone.
"""

import difflib
import shlex
from collections.abc import Iterator
from typing import Any, NamedTuple

from ropecli.checkpoint.dialects import (
    NATIVE_KEYS,
    ORIGINAL_WINDOW,
    PARTIAL_KEYS,
    THETA_KEYS,
    Parameters,
    RopeSettings,
    rope_type_of,
)
from ropecli.checkpoint.fields import first
from ropecli.checkpoint.reading import Checkpoint, section_of
from ropecli.checkpoint.warnings import moot_window
from ropecli.errors import shown
from ropecli.rope import ScaledRope, ScalingSpec
from ropecli.scaling.registry import get_method, varies_with_length

# Read by some model's own code, beside what the rope_type reads.
_READ_ELSEWHERE = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "mrope_section",
    "mrope_interleaved",
    "llama_4_scaling_beta",
    "max_position_embeddings",
    "attn_factor",  # vLLM's name of the attention factor
}
_FROM_WINDOW = ("yarn", "llama3", "longrope")


class Finding(NamedTuple):
    """One thing that is off. rule: its name, for programs. fix: a command that mends it; None where none does."""

    rule: str
    message: str
    fix: str | None = None


class _Facts(NamedTuple):
    """What the rules look at. section: where the RoPE fields are; main: the rope that sees the whole context."""

    checkpoint: Checkpoint
    section: dict[str, Any]
    settings: RopeSettings
    main: ScaledRope

    def fix(self, **options: object) -> str:
        """The patch that writes the same scaling anew, with `options` on top."""
        return patch_command(self.checkpoint.name, self.main.spec, **options)


def find_faults(checkpoint: Checkpoint, settings: RopeSettings, main: ScaledRope) -> list[Finding]:
    """Everything that the rules find, and what the reading itself warned of. main: the rope that sees the most."""
    facts = _Facts(checkpoint, section_of(checkpoint.config), settings, main)
    return _unclear(facts) + [finding for rule in _RULES for finding in rule(facts)]


def _unclear(facts: _Facts) -> list[Finding]:
    """What the reading of config.json itself warned of."""
    fixes = (facts.fix(), facts.fix(original_length="N"))
    return [Finding("unclear", warning, fixes["--original-length" in warning]) for warning in facts.settings.warnings]


def patch_command(name: str, spec: ScalingSpec, **options: object) -> str:
    """`ropecli patch` for this scaling, ready to paste: DIR stands for the folder to write."""
    method = get_method(spec.method)
    words = ["ropecli", "patch", name, "--method", spec.method]
    if "target_length" not in options and spec.method != "none":
        words += ["--factor", f"{spec.factor:g}"]
    for key, value in spec.params.items():
        if isinstance(value, list):
            words += ["--set", f"{key}=..."]
        elif value != method.parameters[key].default:
            words += ["--set", f"{key}={str(value).lower() if isinstance(value, bool) else value}"]
    for key, value in options.items():
        words += [f"--{key.replace('_', '-')}", str(value)]
    return shlex.join([*words, "--output", "DIR"])


def _only_new_dialect(facts: _Facts) -> Iterator[Finding]:
    section, main = facts.section, facts.main
    if not section.get("rope_parameters") or facts.settings.family.layers:
        return
    lost = []
    if main.rope_theta != 10000 and first(section, THETA_KEYS) is None:
        lost.append(f"the base {main.rope_theta:g} (they take 10000)")
    if main.spec.method != "none" and not section.get("rope_scaling"):
        lost.append(f"the scaling by {main.spec.method}")
    if main.geometry.rotary_dim < main.geometry.head_dim and first(section, PARTIAL_KEYS) is None:
        lost.append("the share of the head that turns")
    if lost:
        yield Finding(
            "one-dialect", f"older readers find no word of {', '.join(lost)}: write both dialects.", facts.fix()
        )


def _stale_rope_scaling(facts: _Facts) -> Iterator[Finding]:
    new, old = facts.section.get("rope_parameters"), facts.section.get("rope_scaling")
    if not isinstance(new, dict) or not isinstance(old, dict) or any(isinstance(one, dict) for one in new.values()):
        return
    differing = [key for key in old.keys() & new.keys() if key not in ("type", "rope_type") and old[key] != new[key]]
    for key in sorted(differing):
        yield Finding(
            "two-scalings",
            f"{key} is {shown(old[key])} in rope_scaling and {shown(new[key])} in rope_parameters; transformers 5 "
            "follows rope_scaling.",
            facts.fix(),
        )


def _outside_of_text_config(facts: _Facts) -> Iterator[Finding]:
    config = facts.checkpoint.config
    if facts.section is config:
        return
    stray = [key for key in ("rope_parameters", "rope_scaling", *THETA_KEYS) if config.get(key) is not None]
    if stray:
        message = f"{', '.join(stray)} stand beside text_config, and the text model reads what is inside of it alone."
        yield Finding("outside-text-config", message)


def _stray_original_window(facts: _Facts) -> Iterator[Finding]:
    stray = facts.section.get(ORIGINAL_WINDOW)
    for label, parameters in _dicts(facts.section):
        inside = parameters.get(ORIGINAL_WINDOW)
        if rope_type_of(parameters) not in _FROM_WINDOW:
            continue
        if stray is not None and inside is not None and stray != inside:
            yield Finding(
                "two-original-windows",
                f"{ORIGINAL_WINDOW} is {shown(stray)} at the top and {shown(inside)} in {label}; transformers 5 takes "
                "the one at the top.",
                facts.fix(original_length=facts.main.geometry.original_max_position_embeddings),
            )


def _null_head_dim(facts: _Facts) -> Iterator[Finding]:
    if "head_dim" in facts.section and facts.section["head_dim"] is None:
        message = "head_dim is null, on which transformers 5 stops under yarn, longrope and dynamic."
        yield Finding("null-head-dim", message, facts.fix())


def _unread_keys(facts: _Facts) -> Iterator[Finding]:
    for label, parameters in _dicts(facts.section):
        rope_type = rope_type_of(parameters)
        read = {*NATIVE_KEYS.get(rope_type, ()), *_READ_ELSEWHERE}
        for key in parameters:
            if key in read or isinstance(parameters[key], dict | None):
                continue
            close = difflib.get_close_matches(key, sorted(read), n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            yield Finding(
                "unread-key", f"{key} in {label} is not read under rope_type {rope_type!r}.{hint}", facts.fix()
            )
        if "truncate" in parameters and "." in label:
            message = f"truncate in {label} is not read: transformers 5 looks for it beside the layer types."
            yield Finding("unread-key", message, facts.fix())


def _softmax_scale(facts: _Facts) -> Iterator[Finding]:
    for label, parameters in _dicts(facts.section):
        if not parameters.get("mscale_all_dim"):
            continue
        if rope_type_of(parameters) not in ("yarn", "default"):
            message = (
                f"mscale_all_dim in {label} is left over from yarn, and still multiplies the softmax scale of "
                f"DeepSeek's models under rope_type {rope_type_of(parameters)!r}."
            )
            yield Finding("temperature-left-over", message, facts.fix())
        if parameters.get("attention_factor") is not None:
            message = f"attention_factor and mscale_all_dim in {label} both set the temperature: it counts twice."
            yield Finding("temperature-twice", message, facts.fix())


def _dynamic_switched_off(facts: _Facts) -> Iterator[Finding]:
    window = facts.settings.max_position_embeddings
    if facts.main.spec.method != "dynamic":
        return
    named = [facts.section.get(ORIGINAL_WINDOW), *(one.get(ORIGINAL_WINDOW) for _, one in _dicts(facts.section))]
    smaller = [one for one in named if isinstance(one, int) and one < window]
    if smaller:
        yield Finding(
            "dynamic-switched-off",
            f"dynamic takes max_position_embeddings, {window}, for its pretraining window and scales nothing up to "
            f"there; {ORIGINAL_WINDOW} {smaller[0]} is not read.",
            facts.fix(original_length=smaller[0]),
        )


def _switching(facts: _Facts) -> Iterator[Finding]:
    rope = facts.main
    if varies_with_length(rope.geometry, rope.spec):
        yield Finding(
            "switches-with-length",
            f"{rope.spec.method} here has other frequencies for long inputs than for short ones: rows of a batch, "
            "chunks of a prompt, and a KV cache that grows past the pretraining window do not fit together.",
        )


def _windows(facts: _Facts) -> Iterator[Finding]:
    settings, main = facts.settings, facts.main
    window, original = settings.max_position_embeddings, main.geometry.original_max_position_embeddings
    reach, scaling = round(original * main.spec.factor), f"{main.spec.method} ×{main.spec.factor:g}"
    if main.spec.method in ("linear", "ntk-by-parts", "yarn", "llama3") and window > reach:
        yield Finding(
            "window-beyond-scaling",
            f"max_position_embeddings is {window}, and {scaling} of a pretraining window of {original} reaches "
            f"{reach}.",
            facts.fix(target_length=window),
        )
    if main.spec.method in ("linear", "ntk-by-parts", "yarn", "llama3", "longrope") and window < reach:
        yield Finding(
            "window-below-scaling",
            f"max_position_embeddings is {window}, and {scaling} of a pretraining window of {original} reaches "
            f"{reach}: serving stacks stop at the smaller.",
            facts.fix(),
        )
    longest = (facts.checkpoint.tokenizer_config or {}).get("model_max_length")
    target = max(window, reach) if main.spec.method == "dynamic" else window
    if isinstance(longest, int | float) and not isinstance(longest, bool) and longest < target:
        yield Finding(
            "tokenizer-caps",
            f"the tokenizer's model_max_length is {longest:g} tokens, below the window of {target}: it cuts or warns "
            "there.",
            facts.fix(target_length=target) if main.spec.method != "none" else facts.fix(),
        )


def _sliding(facts: _Facts) -> Iterator[Finding]:
    section, family = facts.section, facts.settings.family
    sliding = moot_window(section, family)
    if sliding is not None and sliding < facts.settings.max_position_embeddings:
        message = f"sliding_window is {sliding}: no layer attends further back, so that extending the window is moot."
        yield Finding("sliding-window", message)
    labels = {str(label) for label in section.get("layer_types") or []}
    mixed = len({family.sees_whole_context(label) for label in labels}) > 1
    if family.only_sliding_turn and mixed:
        message = (
            f"in {family.model_type} only the sliding layers turn; those that see the whole context have no positions, "
            "so that there is nothing to scale: patch --method none --target-length N raises the window alone."
        )
        yield Finding("far-layers-do-not-turn", message)


def _dicts(section: dict[str, Any]) -> list[tuple[str, Parameters]]:
    """Every set of RoPE parameters with the place where it stands."""
    found: list[tuple[str, Parameters]] = []
    for key in ("rope_parameters", "rope_scaling"):
        value = section.get(key)
        if not isinstance(value, dict):
            continue
        nested = [(f"{key}.{label}", one) for label, one in value.items() if isinstance(one, dict)]
        found += nested or [(key, value)]
    return found


_RULES = (
    _only_new_dialect,
    _stale_rope_scaling,
    _outside_of_text_config,
    _stray_original_window,
    _null_head_dim,
    _unread_keys,
    _softmax_scale,
    _dynamic_switched_off,
    _switching,
    _windows,
    _sliding,
)
