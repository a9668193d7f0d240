"""Explains the quantities of `ropecli theory` for a checkpoint and a target, in sentences."""

import math
from collections.abc import Sequence
from typing import Any

from ropecli.analysis.score import LONGEST
from ropecli.reporting.wording import clean
from ropecli.scaling.registry import find_method

Rope = dict[str, Any]
"""One of the report's ropes: the summary of analysis/summary.py, with its name and form."""
_SAME = 1e-9
_BOUND = "by the bound of Men et al. (2024)"
_SCALE = "(0: equal, 2: opposite)"


def theory_sentences(report: dict[str, Any]) -> list[str]:
    """report: of study_report."""
    pretrained, *methods = report["ropes"]
    remapped = [rope for rope in methods if find_method(rope["method"]).remaps]
    changed = [rope for rope in methods if rope not in remapped]
    said = (
        _base(report, changed),
        _largest_distances(remapped),
        _unseen_angles(pretrained, methods),
        _resolution(pretrained, changed),
        _pretrained_images(pretrained, changed),
        _length_dependence(changed),
    )
    return [sentence for sentence in said if sentence]


def _supported(length: int | None) -> str:
    return f"more than {LONGEST:,} tokens" if length is None else f"about {length:,} tokens"


def _base(report: dict[str, Any], changed: Sequence[Rope]) -> str:
    target, supported, smallest = report["target_length"], report["supported_length"], report["smallest_base"]
    said = f"rope_theta {report['ropes'][0]['rope_theta']:,.10g} supports {_supported(supported)} {_BOUND}"
    if supported is None or supported >= target:
        said += f", which covers {target:,}."
    elif smallest is None:
        said += f"; the base for {target:,} was not computed."
    elif math.isinf(smallest):
        said += f"; no base supports {target:,}."
    else:
        said += f"; {target:,} tokens need at least {smallest:,.0f}."
    negative = [rope["first_negative_score"] for rope in changed]
    reached = [_supported(None if first is None else first - 1) for first in negative]
    return f"{said} By the same bound, {_each(changed, 'supports', reached)}." if changed else said


def _largest_distances(remapped: Sequence[Rope]) -> str:
    if not remapped:
        return ""
    largest = [f"{rope['largest_distance']:,}" for rope in remapped]
    return f"At the target, {_each(remapped, 'limits the distances that attention sees to', largest)} tokens."


def _unseen_angles(pretrained: Rope, methods: Sequence[Rope]) -> str:
    """The rotating pairs that complete no rotation in the pretraining length."""
    width, seen = pretrained["rotary_dim"], pretrained["turns_in_window"]
    original_length, target = pretrained["original_max_position_embeddings"], pretrained["target_length"]
    slow = [pair for pair, rotations in enumerate(seen) if 0 < rotations < 1 - _SAME]
    if not slow:
        return f"Every rotating pair completes a rotation in {original_length:,} tokens: no angle is new beyond that."
    said = (
        f"{2 * len(slow)} of {width} rotary dimensions ({2 * len(slow) / width:.0%}) complete no rotation in the "
        f"{original_length:,} tokens of pretraining; beyond that they reach angles not seen in training."
    )
    if target <= original_length or not methods:
        return said
    kept = _each(methods, "keeps", [f"{_inside(rope, seen, slow)}" for rope in methods])
    return f"{said} Of these {len(slow)} pairs, {kept} within the seen angles up to {target:,} tokens."


def _inside(rope: Rope, seen: Sequence[float], pairs: Sequence[int]) -> int:
    """Number of pairs that, up to the largest distance, rotate no further than in pretraining."""
    share = rope["largest_distance"] / (rope["largest_distance"] + 1)  # turns_in_target counts one token more
    return sum(rope["turns_in_target"][pair] * share <= seen[pair] * (1 + _SAME) for pair in pairs)


def _resolution(pretrained: Rope, changed: Sequence[Rope]) -> str:
    before = pretrained["granularity"]
    if not changed or before <= 0:
        return ""
    shares = [f"{rope['granularity'] / before:.0%}" for rope in changed]
    return (
        f"Granularity: adjacent positions differ by a mean sine of {before:.3g} as pretrained; "
        f"{_each(changed, 'keeps', shares)} of it. Less of it makes nearby positions harder to distinguish."
    )


def _pretrained_images(pretrained: Rope, changed: Sequence[Rope]) -> str:
    """Empty unless the target is beyond the pretraining length and that is short enough to compare all positions."""
    before = pretrained["distance_to_old_images"]
    if not before or math.isnan(before):
        return ""
    said = f"Unscaled, position embeddings are up to {before:.3f} from the nearest pretrained one"
    after = [f"{rope['distance_to_old_images']:.3f}" for rope in changed]
    return f"{said}; {_each(changed, 'brings this to', after)} {_SCALE}." if changed else f"{said} {_SCALE}."


def _length_dependence(changed: Sequence[Rope]) -> str:
    names = [_name(rope) for rope in changed if find_method(rope["method"]).depends_on_length]
    if not names:
        return ""
    return f"The frequencies of {_list(names)} depend on the length; shown for {changed[0]['target_length']:,} tokens."


def _each(ropes: Sequence[Rope], verb: str, values: Sequence[str]) -> str:
    """Like "linear ×8 keeps 13%, ntk ×8 92% and yarn ×8 83%"."""
    first, *others = [(_name(rope), value) for rope, value in zip(ropes, values, strict=True)]
    return _list([f"{first[0]} {verb} {first[1]}", *(f"{name} {value}" for name, value in others)])


def _name(rope: Rope) -> str:
    """The name without a comma, for use in a list."""
    name, comma, rest = clean(rope["name"]).partition(", as ")
    return f"{name} (as {rest})" if comma else name


def _list(words: Sequence[str]) -> str:
    return " and ".join([*([", ".join(words[:-1])] if len(words) > 1 else []), words[-1]])
