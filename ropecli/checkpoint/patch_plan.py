"""What a patch would write, worked out without writing: PatchPlan. Loads neither torch nor transformers."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ropecli.checkpoint import plan_warnings
from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.provenance import (
    Provenance,
    read_record,
    tuned_for,
    tuned_weights,
    untuned,
)
from ropecli.checkpoint.state import CheckpointState, edit_warning, far_layers, read_state, scale_layers
from ropecli.config.changes import ConfigChange, diff
from ropecli.config.dialects import MSCALE_PAIR
from ropecli.config.encoding import write_settings
from ropecli.config.fields import section_of
from ropecli.config.saved_remapping import SavedRemapping, read_saved_remapping, write_saved_remapping
from ropecli.config.settings import RopeSettings, read_settings
from ropecli.errors import MethodError, PatchError
from ropecli.scaling.scale import varies_with_length
from ropecli.scaling.spec import ScaledRope, ScalingSpec, check_factor, label_of


@dataclass(frozen=True)
class PatchPlan:
    """What would be written: printable, diffable, free to make.

    ropes: by layer type (None where all share one), untouched ones included; scaled: the layer types that were
    scaled. original: the config before any patch; config: after it, None for a method that no stock reader can
    express (`unwritable` says why); changes: against the config as it stands. max_position_embeddings: to
    write, tokens. settings_warnings: what the source leaves open; scaling_warnings: these and what holds wherever
    the model is scaled; writing_warnings: what holds for a written patch alone.
    """

    source: Checkpoint
    spec: ScalingSpec
    ropes: dict[str | None, ScaledRope]
    scaled: tuple[str | None, ...]
    original: dict[str, Any]
    config: dict[str, Any]
    changes: tuple[ConfigChange, ...]
    unwritable: str | None
    max_position_embeddings: int
    target_length: int
    settings_warnings: tuple[str, ...]
    scaling_warnings: tuple[str, ...]
    writing_warnings: tuple[str, ...]

    @property
    def remaps(self) -> bool:
        """Whether the method is one of distances: its attention is ropecli's, proved on a small model."""
        return any(rope.remapping is not None for rope in self.ropes.values())

    @property
    def warnings(self) -> tuple[str, ...]:
        """All that there is to say of a patch that is written."""
        return self.scaling_warnings + self.writing_warnings


def _before_patches(
    state: CheckpointState, original_length: int | None = None
) -> tuple[dict[str, Any], RopeSettings, tuple[str, ...]]:
    """The config before any patch of ours, its RoPE settings, and what these leave open.

    original_length: corrects its pretraining length, tokens. Raises PatchError where the config is not known for sure.
    """
    checkpoint, note, edited = state.checkpoint, state.note, state.edited
    if note is not None:
        settings = read_settings(note.original, original_length or note.original_length)
        return note.original, settings, settings.warnings
    settings = read_settings(checkpoint.config, original_length)
    _refuse_unknown_base(checkpoint.name, edited)
    _refuse_remapped(checkpoint, edited)
    return copy.deepcopy(checkpoint.config), settings, edit_warning(edited) + settings.warnings


def make_plan(
    checkpoint: Checkpoint,
    spec: ScalingSpec,
    *,
    target_length: int | None = None,
    original_length: int | None = None,
    layer_types: Sequence[str] | None = None,
    choose_factor: bool = True,
) -> PatchPlan:
    """Plans to patch `checkpoint`.

    target_length: tokens; with choose_factor the factor follows from it and the true pretraining length, whatever
    spec.factor says. original_length: corrects a config that lies about it. layer_types: those to scale
    in place of the ones that see the whole context. Raises MethodError for a factor or target out of range,
    PatchError for layer types that are not there, and for what the architecture does not allow.
    """
    config, settings, left_open = _before_patches(read_state(checkpoint), original_length)
    labels = _labels_to_scale(checkpoint.name, settings, layer_types)
    if spec.method.remaps:
        _refuse_near_layers(config, settings, labels)
    geometry = next(rope.geometry for rope in settings.ropes if rope.geometry.layer_type in labels)
    spec = _with_factor(spec, geometry.original_max_position_embeddings, target_length, choose_factor)
    spec = _with_softmax_scale(spec, settings, labels)
    target = target_length or round(geometry.original_max_position_embeddings * spec.factor)
    ropes = scale_layers(settings, spec, labels, target)
    # transformers takes max_position_embeddings for dynamic NTK's pretraining length: raised, it would switch it off.
    keeps_length = spec.method.rope_type == "dynamic"
    written_length = geometry.original_max_position_embeddings if keeps_length else target
    scaled = {label: ropes[label] for label in labels}
    _refuse_own_positions(settings, scaled.values())
    patched, unwritable = copy.deepcopy(config), None
    try:
        write_settings(patched, _as_written(settings, scaled), written_length)
        if (saved := SavedRemapping.of(scaled.values())) is not None:
            write_saved_remapping(patched, saved)
    except PatchError as error:
        patched, unwritable = config, str(error)
    opened = (*left_open, *_of_tuned_weights(checkpoint, spec))
    return PatchPlan(
        source=checkpoint,
        spec=spec,
        ropes=ropes,
        scaled=labels,
        original=config,
        config=patched,
        changes=tuple(diff(checkpoint.config, patched)),
        unwritable=unwritable,
        max_position_embeddings=written_length,
        target_length=target,
        settings_warnings=opened,
        scaling_warnings=(*opened, *plan_warnings.of_scaling(config, settings, spec, scaled, target)),
        writing_warnings=tuple(plan_warnings.of_writing(config, spec, scaled[labels[0]], written_length)),
    )


def _of_tuned_weights(checkpoint: Checkpoint, spec: ScalingSpec) -> tuple[str, ...]:
    """What `ropecli tune` put into the weights suits the scaling that it was learned with, and no other."""
    record = read_record(checkpoint.folder)
    if not tuned_weights(record) or tuned_for(record) == label_of(spec.method.name, spec.factor, spec.params):
        return ()
    return (
        f"the weights of {checkpoint.name} hold what `ropecli tune` learned for {tuned_for(record)}: they do not suit "
        f"another scaling, nor none. As they were before they are in the checkpoint that was tuned, {untuned(record)}.",
    )


def _labels_to_scale(name: str, settings: RopeSettings, layer_types: Sequence[str] | None) -> tuple[str | None, ...]:
    present = [rope.geometry.layer_type for rope in settings.ropes]
    if layer_types is None:
        labels = far_layers(settings)
        if not labels:
            raise PatchError(
                f"{name}: no layer that sees the whole context has rotary positions. "
                f"--layer-types scales others: {', '.join(str(label) for label in present)}."
            )
        return labels
    if present == [None]:
        raise PatchError(f"{name}: --layer-types chooses between ropes, and here all layers share one.")
    unknown = [label for label in layer_types if label not in present]
    if unknown or not layer_types:
        raise PatchError(
            f"--layer-types names {', '.join(unknown) or 'none'}; the layers of {name} that turn are of type "
            f"{', '.join(str(label) for label in present)}."
        )
    return tuple(label for label in present if label in layer_types)


def _with_factor(
    spec: ScalingSpec, original_length: int, target_length: int | None, choose_factor: bool
) -> ScalingSpec:
    """The factor that the target length, tokens, asks for, unless another was given on purpose."""
    if target_length is not None and target_length < original_length:
        raise MethodError(
            f"The target length {target_length} is below the pretraining length, {original_length}. "
            "Give at least that, or correct it with --original-length."
        )
    if target_length is not None and choose_factor:
        spec = replace(spec, factor=target_length / original_length)
    check_factor(spec.factor)
    return spec


def _as_written(settings: RopeSettings, scaled: Mapping[str | None, ScaledRope]) -> dict[str | None, ScaledRope]:
    """What the RoPE fields have to say: of a rope that is remapped, the scaling that the checkpoint came with."""
    shipped = {rope.geometry.layer_type: rope.spec for rope in settings.ropes}
    return {label: replace(rope, spec=shipped[label]) if rope.remapping else rope for label, rope in scaled.items()}


def _with_softmax_scale(spec: ScalingSpec, settings: RopeSettings, labels: Sequence[str | None]) -> ScalingSpec:
    """DeepSeek's mscale pair goes over into a new YaRN, which then scales its logits as the model was trained; never
    into another method: the pair would still multiply the softmax scale there."""
    if spec.method.name != "yarn" or any(key in spec.params for key in (*MSCALE_PAIR, "attention_factor")):
        return spec
    before = next(rope.spec.params for rope in settings.ropes if rope.geometry.layer_type in labels)
    return replace(spec, params={**spec.params, **{key: before[key] for key in MSCALE_PAIR if key in before}})


def _refuse_own_positions(settings: RopeSettings, ropes: Iterable[ScaledRope]) -> None:
    """transformers makes frequencies that follow the length anew for each set of positions, by the largest of them."""
    for rope in ropes:
        if rope.geometry.layer_type in settings.family.own_positions and varies_with_length(rope):
            raise PatchError(
                f"{rope.spec.method} follows the length, but the compressors of {settings.family.model_type} rotate by "
                "positions of their own: one forward pass would mix several frequencies. Use a method with one set of "
                "frequencies for all lengths, such as yarn or ntk."
            )


def _refuse_near_layers(config: dict[str, Any], settings: RopeSettings, labels: Sequence[str | None]) -> None:
    """Distances are remapped in the layers that see the whole context, in all of them and in no other.

    labels: the layer types to remap.
    """
    sliding = plan_warnings.moot_sliding_window(section_of(config), settings.family)
    if sliding is not None:
        raise PatchError(
            f"sliding_window is {sliding}, and no layer looks back further: other distances have no meaning there. "
            "--method none raises the context length alone."
        )
    far = [rope.geometry.layer_type for rope in settings.ropes if rope.far]
    if set(labels) != set(far):
        raise PatchError(
            f"--layer-types names {', '.join(map(str, labels))}; a relative-position method is for the layers that see "
            f"the whole context, {', '.join(map(str, far)) or 'of which none turns'}. Leave --layer-types out."
        )


def _refuse_remapped(checkpoint: Checkpoint, provenance: Provenance | None) -> None:
    saved = read_saved_remapping(checkpoint.config)
    if saved is None:
        return
    if provenance is None:
        reason, step = "no ropecli.yaml says what its config.json was before", "Take"
    else:
        edited = ", ".join(provenance.edited)
        reason, step = f"its config.json was edited since ropecli.yaml was written ({edited})", "Undo the edit, or take"
    raise PatchError(f"{checkpoint.name} carries {saved.method}, and {reason}. {step} the checkpoint before the patch.")


def _refuse_unknown_base(name: str, provenance: Provenance | None) -> None:
    if provenance and provenance.method in ("ntk", "abf"):
        raise PatchError(
            f"{name} was patched with {provenance.method}, which is another base, and its config.json "
            f"was edited since ({', '.join(provenance.edited)}): the pretrained base is not known for sure. Undo the "
            "edit; or set rope_theta to the pretrained base and remove ropecli.yaml."
        )
