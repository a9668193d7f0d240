"""What a patch is refused for: a base that is not known for sure, layers where distances are not remapped, and
frequencies that would disagree within one forward pass."""

from collections.abc import Iterable, Sequence
from typing import Any

from ropecli.checkpoint import plan_warnings
from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.provenance import Provenance
from ropecli.config.fields import section_of
from ropecli.config.saved_remapping import read_carrier
from ropecli.config.settings import RopeSettings
from ropecli.errors import PatchError
from ropecli.rope import ScaledRope
from ropecli.scaling.registry import varies_with_length


def refuse_own_positions(settings: RopeSettings, ropes: Iterable[ScaledRope]) -> None:
    """transformers makes frequencies that follow the length anew for each set of positions, by the largest of them."""
    for rope in ropes:
        if rope.geometry.layer_type in settings.family.own_positions and varies_with_length(rope.geometry, rope.spec):
            raise PatchError(
                f"{rope.spec.method} follows the length, but the compressors of {settings.family.model_type} rotate by "
                "positions of their own: one forward pass would mix several frequencies. Use a method with one set of "
                "frequencies for all lengths, such as yarn or ntk."
            )


def refuse_near_layers(config: dict[str, Any], settings: RopeSettings, labels: Sequence[str | None]) -> None:
    """Distances are remapped in the layers that see the whole context, in all of them and in no other.

    labels: the layer types to remap.
    """
    sliding = plan_warnings.moot_window(section_of(config), settings.family)
    if sliding is not None:
        raise PatchError(
            f"sliding_window is {sliding}, and no layer looks back further: other distances have no meaning there. "
            "--method none raises the window alone."
        )
    far = [rope.geometry.layer_type for rope in settings.ropes if rope.far]
    if set(labels) != set(far):
        raise PatchError(
            f"--layer-types names {', '.join(map(str, labels))}; a relative-position method is for the layers that see "
            f"the whole context, {', '.join(map(str, far)) or 'of which none turns'}. Leave --layer-types out."
        )


def refuse_remapped(checkpoint: Checkpoint, provenance: Provenance | None) -> None:
    carrier = read_carrier(checkpoint.config)
    if carrier is None:
        return
    if provenance is None:
        reason, step = "no ropecli.yaml says what its config.json was before", "Take"
    else:
        edited = ", ".join(provenance.edited)
        reason, step = f"its config.json was edited since ropecli.yaml was written ({edited})", "Undo the edit, or take"
    raise PatchError(
        f"{checkpoint.name} carries {carrier.method}, and {reason}. {step} the checkpoint before the patch."
    )


def refuse_unknown_base(name: str, provenance: Provenance | None) -> None:
    if provenance and provenance.spec.method in ("ntk", "abf"):
        raise PatchError(
            f"{name} was patched with {provenance.spec.method}, which is another base, and its config.json "
            f"was edited since ({', '.join(provenance.edited)}): the pretrained base is not known for sure. Undo the "
            "edit; or set rope_theta to the pretrained base and remove ropecli.yaml."
        )
