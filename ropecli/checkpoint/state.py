"""Positions: what a model computes and how far. CheckpointState: what a checkpoint's files say, read once.

If ropecli.yaml matches config.json, it defines the pretrained geometry and the method, because config.json has only the
new base of ntk or abf, not the pretrained one. Otherwise only config.json is used.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.provenance import Provenance, read_provenance
from ropecli.config.encoding import write_context_length
from ropecli.config.families import family_of
from ropecli.config.fields import section_of
from ropecli.config.findings import Finding
from ropecli.config.saved_remapping import SavedRemapping, read_saved_remapping
from ropecli.config.settings import ConfiguredRope, RopeSettings, read_settings
from ropecli.errors import PatchError
from ropecli.scaling.spec import ScaledRope, ScalingSpec, remap, scale, varies_with_length


@dataclass(frozen=True)
class Positions:
    """The positions of a checkpoint, or those that a planned patch would give it.

    ropes: by layer type, including unscaled ones; under None if all layers share one. main: the one that represents the
    model. pretraining_length, context_length: tokens that the model was pretrained to read, and reads.
    """

    ropes: Mapping[str | None, ScaledRope]
    main: ScaledRope
    pretraining_length: int
    context_length: int


@dataclass(frozen=True)
class CheckpointState:
    """The state of a checkpoint's positions, from `read_state`. Properties are computed on demand.

    settings: from config.json, but the pretraining length of `note`. note: the patch that ropecli.yaml records, if
    config.json still matches it. edited: the same patch, if config.json was edited later, so that it no longer holds.
    At most one of the two is set.
    """

    checkpoint: Checkpoint
    settings: RopeSettings
    note: Provenance | None = None
    edited: Provenance | None = None

    @property
    def section(self) -> dict[str, Any]:
        """The part of config.json that holds the RoPE fields."""
        return section_of(self.checkpoint.config)

    @cached_property
    def saved_remapping(self) -> SavedRemapping | None:
        """The distance method in config.json. Raises CheckpointError for an incomplete one."""
        return read_saved_remapping(self.checkpoint.config)

    @cached_property
    def before(self) -> RopeSettings:
        """The settings before any known patch. Raises CheckpointError."""
        if self.note is not None:
            return read_settings(self.note.original, self.note.original_length)
        if self.saved_remapping is None:
            return self.settings
        # of the RoPE settings, a distance method changes only the context length
        config = copy.deepcopy(self.checkpoint.config)
        write_context_length(section_of(config), family_of(config), self.saved_remapping.pretrained)
        return read_settings(config)

    @cached_property
    def positions(self) -> Positions:
        """The positions in effect. The pretraining length is as the makers say, or as the files do.

        The main rope has the largest factor among layers that see the whole context; of several, it is that of
        full_attention. Raises MethodError, and CheckpointError for an incomplete distance method.
        """
        ropes = self._ropes()
        far = [ropes[label] for label in far_layers(self.settings) if label in ropes]
        candidates = far or list(ropes.values())
        main = max(candidates, key=lambda rope: (rope.spec.factor, rope.geometry.layer_type == "full_attention"))
        makers = self.before.known_makers
        pretraining_length = makers.pretraining_length if makers else main.geometry.original_max_position_embeddings
        context_length = self.note.target_length if self.note is not None else self.settings.context_length
        return Positions(ropes, main, pretraining_length, context_length)

    def _ropes(self) -> dict[str | None, ScaledRope]:
        if self.note is not None:
            return scale_layers(self.before, self.note.spec(), self.note.layer_types, self.note.target_length)
        ropes = self.before.scaled()
        if saved := self.saved_remapping:
            for label in far_layers(self.before):
                # as in ropecli.yaml, the factor is relative to the pretraining length
                factor = saved.target / ropes[label].geometry.original_max_position_embeddings
                spec = replace(saved.spec, factor=factor)
                ropes[label] = replace(ropes[label], spec=spec, remapping=saved.remapping())
        return ropes

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """About missing or contradictory values in the files."""
        return self.edit_findings + (self.settings if self.note is not None else self.before).findings

    @property
    def edit_findings(self) -> tuple[Finding, ...]:
        """That ropecli.yaml is ignored, if config.json was edited after it."""
        if self.edited is None:
            return ()
        keys = ", ".join(self.edited.edited)
        return (Finding("edited", f"ignoring ropecli.yaml: config.json was edited after it was written ({keys})."),)


def read_state(checkpoint: Checkpoint) -> CheckpointState:
    """Read config.json and ropecli.yaml, once per Checkpoint object.

    Raises CheckpointError, also for a model without rotary embeddings.
    """
    state: CheckpointState | None = checkpoint.memory.get("state")
    if state is None:
        provenance = read_provenance(checkpoint)
        note, edited = (None, provenance) if provenance and provenance.edited else (provenance, None)
        # ropecli.yaml records the pretraining length, which config.json may lack
        settings = read_settings(checkpoint.config, note.original_length if note else None)
        state = checkpoint.memory["state"] = CheckpointState(checkpoint, settings, note, edited)
    return state


def far_layers(settings: RopeSettings) -> tuple[str | None, ...]:
    """The layer types that see the whole context, in the config's order; (None,) if all layers share one rope.

    If none of them has rotary embeddings, all layer types that have.
    """
    far = tuple(rope.geometry.layer_type for rope in settings.ropes if rope.far)
    return far or tuple(rope.geometry.layer_type for rope in settings.ropes)


def scale_layers(
    settings: RopeSettings, spec: ScalingSpec, labels: Sequence[str | None], target_length: int
) -> dict[str | None, ScaledRope]:
    """Scale the layer types in `labels`; others stay unchanged. target_length: tokens.

    A distance method without a frequency method keeps the shipped frequencies. Raises MethodError, PatchError.
    """
    frequency = spec.frequency.checked() if spec.frequency else None
    ropes = {}
    for rope in settings.ropes:
        label = rope.geometry.layer_type
        ropes[label] = scale(rope.geometry, frequency if frequency and label in labels else rope.spec.checked())
        if spec.method.remaps and label in labels:
            if varies_with_length(ropes[label]):
                raise PatchError(
                    f"The checkpoint ships with {ropes[label].spec.method}, whose frequencies depend on the length. "
                    "Distance methods require constant frequencies."
                )
            trained = ropes[label].scaled_length if frequency else _trained_length(settings, rope)
            ropes[label] = remap(ropes[label], spec, trained, target_length)
    return ropes


def _trained_length(settings: RopeSettings, rope: ConfiguredRope) -> int:
    """Tokens that the layers of `rope` were trained on: the whole context length if the makers shipped a scaling."""
    original = rope.geometry.original_max_position_embeddings
    return original if rope.spec.method.name == "none" else max(original, settings.max_position_embeddings)
