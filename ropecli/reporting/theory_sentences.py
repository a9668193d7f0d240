"""What the quantities of `ropecli theory` mean for a checkpoint and a target, in plain words."""

import math
from collections.abc import Sequence
from typing import Any

from ropecli.analysis.score import LONGEST
from ropecli.reporting.wording import clean
from ropecli.scaling.registry import find_method

Rope = dict[str, Any]
"""One of the report's ropes: what analysis/summary.py says of it, with its name and form."""
_SAME = 1e-9
_BOUND = "by the bound of Men et al. 2024"
_SCALE = "(0: the same, 2: opposite)"


def theory_sentences(report: dict[str, Any]) -> list[str]:
    """report: of study_report."""
    pretrained, *methods = report["ropes"]
    remapped = [rope for rope in methods if find_method(rope["method"]).remaps]
    changed = [rope for rope in methods if rope not in remapped]
    said = (
        _base(report, changed),
        _farthest(remapped),
        _unseen(pretrained, methods),
        _neighbours(pretrained, changed),
        _old_images(pretrained, changed),
        _following(changed),
    )
    return [sentence for sentence in said if sentence]


def base_bound_sentence(report: dict[str, Any]) -> str:
    """The base bound of a checkpoint as it is. report: of inspect_checkpoint."""
    supported, length = report["supported_length"], report["target_length"]
    what = f"rope_theta {report['rope_theta']:,.10g} supports"
    needs = "needs"
    if report["method"] != "none":
        what = f"The frequencies of {clean(report['method'])} ×{report['factor']:g} support"
        needs = "needs an unscaled base of"
    said = f"{what} {_supported(supported)} {_BOUND}"
    if report["remaps"]:
        distance = report["largest_distance"]
        return f"{said}; attention sees distances of up to {distance:,} at its context length of {length:,}."
    if supported is None or supported >= length:
        return f"{said}, which covers its context length of {length:,}."
    smallest = report["smallest_base"]
    if smallest is None:
        return f"{said}; `ropecli theory CHECKPOINT` says what its context length of {length:,} needs."
    if math.isinf(smallest):
        return f"{said}; no base would support its context length of {length:,}."
    return f"{said}; its context length of {length:,} {needs} at least {smallest:,.0f}."


def _supported(length: int | None) -> str:
    return f"more than {LONGEST:,} tokens" if length is None else f"about {length:,} tokens"


def _base(report: dict[str, Any], changed: Sequence[Rope]) -> str:
    target, supported, smallest = report["target_length"], report["supported_length"], report["smallest_base"]
    said = f"rope_theta {report['ropes'][0]['rope_theta']:,.10g} supports {_supported(supported)} {_BOUND}"
    if supported is None or supported >= target:
        said += f", which covers {target:,}."
    elif smallest is None:
        said += f"; what {target:,} need is not worked out."
    elif math.isinf(smallest):
        said += f"; no base would support {target:,}."
    else:
        said += f"; {target:,} need at least {smallest:,.0f}."
    negative = [rope["first_negative_score"] for rope in changed]
    reached = [_supported(None if first is None else first - 1) for first in negative]
    return f"{said} By the same measure {_each(changed, 'supports', reached)}." if changed else said


def _farthest(remapped: Sequence[Rope]) -> str:
    if not remapped:
        return ""
    largest = [f"{rope['largest_distance']:,}" for rope in remapped]
    return f"At the target, {_each(remapped, 'lets attention see distances of at most', largest)} tokens."


def _unseen(pretrained: Rope, methods: Sequence[Rope]) -> str:
    """Of the pairs that turn, those that do not turn once."""
    width, seen = pretrained["rotary_dim"], pretrained["turns_in_window"]
    original_length, target = pretrained["original_max_position_embeddings"], pretrained["target_length"]
    slow = [pair for pair, turns in enumerate(seen) if 0 < turns < 1 - _SAME]
    if not slow:
        return f"Every pair that turns completes a turn in {original_length:,} tokens: no angle is new beyond them."
    said = (
        f"{2 * len(slow)} of {width} rotary dimensions ({2 * len(slow) / width:.0%}) never complete a turn in the "
        f"{original_length:,} tokens of pretraining; beyond these they come to angles that training has not shown."
    )
    if target <= original_length or not methods:
        return said
    kept = _each(methods, "keeps", [f"{_inside(rope, seen, slow)}" for rope in methods])
    return f"{said} Of their {len(slow)} pairs {kept} within what was shown up to {target:,}."


def _inside(rope: Rope, seen: Sequence[float], pairs: Sequence[int]) -> int:
    """How many of the pairs turn no farther, up to the largest distance, than they have turned in pretraining."""
    share = rope["largest_distance"] / (rope["largest_distance"] + 1)  # the turns are those of one token more
    return sum(rope["turns_in_target"][pair] * share <= seen[pair] * (1 + _SAME) for pair in pairs)


def _neighbours(pretrained: Rope, changed: Sequence[Rope]) -> str:
    before = pretrained["granularity"]
    if not changed or before <= 0:
        return ""
    shares = [f"{rope['granularity'] / before:.0%}" for rope in changed]
    return (
        f"Neighbours are told apart by a mean sine of {before:.3g} as pretrained, of which "
        f"{_each(changed, 'keeps', shares)}: the less, the blurrier what is near."
    )


def _old_images(pretrained: Rope, changed: Sequence[Rope]) -> str:
    """Where the target is beyond the pretraining length, which is not too long to compare all its images."""
    before = pretrained["distance_to_old_images"]
    if not before or math.isnan(before):
        return ""
    said = f"Unscaled, the position least like those of pretraining lies {before:.3f} from the nearest of them"
    after = [f"{rope['distance_to_old_images']:.3f}" for rope in changed]
    return f"{said}; {_each(changed, 'brings it to', after)} {_SCALE}." if changed else f"{said} {_SCALE}."


def _following(changed: Sequence[Rope]) -> str:
    names = [_name(rope) for rope in changed if find_method(rope["method"]).depends_on_length]
    if not names:
        return ""
    return (
        f"The frequencies of {_list(names)} depend on the length; these are for {changed[0]['target_length']:,} tokens."
    )


def _each(ropes: Sequence[Rope], verb: str, values: Sequence[str]) -> str:
    """As "linear ×8 keeps 13%, ntk ×8 92% and yarn ×8 83%"."""
    first, *others = [(_name(rope), value) for rope, value in zip(ropes, values, strict=True)]
    return _list([f"{first[0]} {verb} {first[1]}", *(f"{name} {value}" for name, value in others)])


def _name(rope: Rope) -> str:
    """Inside of a sentence."""
    return clean(rope["name"]).replace(", as it is", " (as it is)")


def _list(words: Sequence[str]) -> str:
    return " and ".join([*([", ".join(words[:-1])] if len(words) > 1 else []), words[-1]])
