"""What the rules of lint.py look at: a checkpoint's RoPE fields and windows, and the patch that would mend them."""

import shlex
from typing import Any, NamedTuple

from ropecli.checkpoint.files import CONFIG
from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.provenance import Provenance, read_provenance
from ropecli.config.dialects import ORIGINAL_WINDOW, UNNAMED_WINDOW, Parameters, RopeSettings, rope_type_of
from ropecli.config.fields import section_of
from ropecli.errors import shown
from ropecli.rope import ScaledRope, ScalingSpec
from ropecli.scaling.registry import get_method

_FROM_WINDOW = ("yarn", "llama3", "longrope")
# Their factor is a ratio of windows. Not llama3's: Llama 3.1 names 8 for 8192 to 131072 tokens, and Llama 3.2 names 32.
_BY_RATIO = ("linear", "ntk-by-parts", "yarn")


class Facts(NamedTuple):
    """What the rules look at. section: where the RoPE fields are; main: the rope that sees the whole context; note:
    ropecli.yaml, where config.json is still as it says.
    """

    checkpoint: Checkpoint
    section: dict[str, Any]
    settings: RopeSettings
    main: ScaledRope
    note: Provenance | None

    @property
    def window(self) -> int:
        return self.settings.max_position_embeddings

    @property
    def original(self) -> int:
        return self.main.geometry.original_max_position_embeddings

    @property
    def reach(self) -> int:
        """The pretraining window × the factor, tokens."""
        return round(self.original * self.main.spec.factor)

    @property
    def guesses_window(self) -> bool:
        """Whether a scaling is read without the pretraining window that it is of."""
        return any(UNNAMED_WINDOW in warning for warning in self.settings.warnings)

    @property
    def target(self) -> int:
        """The window, tokens, or what the scaling reaches, where config.json stays behind it."""
        return self.window if self.guesses_window else max(self.window, self.reach)

    @property
    def dicts(self) -> list[tuple[str, Parameters]]:
        """Every set of RoPE parameters with the place where it stands."""
        found: list[tuple[str, Parameters]] = []
        for key in ("rope_parameters", "rope_scaling"):
            value = self.section.get(key)
            if isinstance(value, dict):
                nested = [(f"{key}.{named(label)}", one) for label, one in value.items() if isinstance(one, dict)]
                found += nested or [(key, value)]
        return found

    @property
    def falls_short(self) -> bool:
        return self.main.spec.method in _BY_RATIO and self.window > self.reach and not self.guesses_window

    @property
    def stops_early(self) -> bool:
        method = self.main.spec.method
        return method in (*_BY_RATIO, "longrope") and self.window < self.reach and not self.guesses_window

    @property
    def contradicting_windows(self) -> list[tuple[str, Any]]:
        """Where a pretraining window is named that the one at the top overrules."""
        stray = self.section.get(ORIGINAL_WINDOW)
        if stray is None:
            return []
        found = [
            (label, one.get(ORIGINAL_WINDOW))
            for label, one in self.dicts
            if "." not in label and rope_type_of(one) in _FROM_WINDOW  # layer by layer, the one at the top is not read
        ]
        return [(label, inside) for label, inside in found if inside is not None and inside != stray]

    @property
    def unread_windows(self) -> list[int]:
        """Pretraining windows that are named for dynamic, smaller than the one that is taken."""
        windows = [self.section.get(ORIGINAL_WINDOW), *(one.get(ORIGINAL_WINDOW) for _, one in self.dicts)]
        return [one for one in windows if isinstance(one, int) and not isinstance(one, bool) and 0 < one < self.window]

    @property
    def fix(self) -> str | None:
        """The patch that writes the same scaling anew: one command that mends all that a patch can mend.

        None for a relative-position method without its note: such a checkpoint is not patched again.
        """
        if self.main.remapping is not None and self.note is None:
            return None
        spec, options = self.main.spec, self._lengths()
        if self.note and self.note.layer_types and self.main.geometry.layer_type not in self.note.layer_types:
            spec = self.note.spec
            options["layer_types"] = ",".join(map(str, self.note.layer_types))
        return patch_command(self.checkpoint, spec, by_window=self.falls_short, **options)

    def _lengths(self) -> dict[str, object]:
        """The options by which the patch starts from the true pretraining window, and keeps the window there is."""
        if self.guesses_window:
            return {"original_length": "N"}
        unread = self.unread_windows
        if self.main.spec.method == "dynamic":
            return {"original_length": unread[0]} if unread else {}
        lengths: dict[str, object] = {}
        if self.contradicting_windows:
            lengths["original_length"] = self.original
        if self.window != self.reach and self.window >= self.original and not self.stops_early:
            lengths["target_length"] = self.window
        return lengths


def gather(checkpoint: Checkpoint, settings: RopeSettings, main: ScaledRope) -> Facts:
    """settings: as config.json shows them; main: the rope that sees the whole context."""
    note = read_provenance(checkpoint)
    note = None if note is None or note.edited else note
    return Facts(checkpoint, section_of(checkpoint.config), settings, main, note)


def patch_command(checkpoint: Checkpoint, spec: ScalingSpec, *, by_window: bool = False, **options: object) -> str:
    """`ropecli patch` for this scaling, ready to paste: DIR stands for the folder to write, N for a number to find.

    by_window: leave the factor to follow from the target length.
    """
    words = ["ropecli", "patch", checkpoint.name]
    if checkpoint.revision is not None:
        words += ["--revision", checkpoint.revision]
    # what custom gives is written as longrope, and read back from there
    words += ["--method", "longrope" if spec.method == "custom" else spec.method]
    if spec.method != "none" and not by_window:
        words += ["--factor", _exact(spec.factor)]
    if any(isinstance(value, list) for value in spec.params.values()):
        words += ["--factors-file", str(checkpoint.folder / CONFIG)]
    else:
        words += _settings(spec)
    for key, value in options.items():
        words += [f"--{key.replace('_', '-')}", str(value)]
    return shlex.join([*words, "--output", "DIR"])


def _settings(spec: ScalingSpec) -> list[str]:
    """--set for what is not as the method has it anyway."""
    words, known = [], get_method(spec.method).parameters
    for key, value in spec.params.items():
        if value is not None and value != known[key].default:
            words += ["--set", f"{key}={str(value).lower() if isinstance(value, bool) else value}"]
    return words


def _exact(number: float) -> str:
    short = f"{number:g}"
    return short if float(short) == number else repr(float(number))


def named(key: str) -> str:
    """A key as a message shows it, whoever wrote it."""
    return key if key.isidentifier() and len(key) <= 60 else shown(key)
