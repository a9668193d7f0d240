"""A checkpoint to measure, with its scaling, and the models that read for it."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ropecli.attention import load_model
from ropecli.attention.loaded import check_tables
from ropecli.attention.patching import live_patch
from ropecli.checkpoint.identity import Identity, identity_of
from ropecli.checkpoint.opening import Checkpoint, open_checkpoint
from ropecli.checkpoint.patch_plan import PatchPlan, make_plan
from ropecli.checkpoint.state import Positions, read_state
from ropecli.config.fields import section_of
from ropecli.errors import MethodError
from ropecli.evaluation.readers.live import LiveReader
from ropecli.evaluation.readers.reader import Reader
from ropecli.evaluation.report import environment
from ropecli.live.devices import computes_bfloat16
from ropecli.live.loading import choose_device, resolve_dtype_and_device, vocabulary_mismatch
from ropecli.live.proof import require_reading
from ropecli.live.rotary import unpatched_after
from ropecli.messages import progress_bar, say, warn
from ropecli.names import AS_IS, LENGTH_ONLY
from ropecli.scaling.spec import ScalingSpec, make_spec, varies_with_length

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LARGE = 50_000_000
"""Bytes of weights from which a CPU computes in bfloat16, if it can: smaller models are fast enough."""


@dataclass(frozen=True)
class Subject:
    """A checkpoint to measure. plan: the patch to apply in memory; None: as it is. is_baseline: named by the user."""

    checkpoint: Checkpoint
    plan: PatchPlan | None = None
    is_baseline: bool = False

    @property
    def positions(self) -> Positions:
        return (self.plan or read_state(self.checkpoint)).positions

    @property
    def spec(self) -> ScalingSpec:
        """The scaling to report."""
        return self.plan.spec if self.plan else self.positions.main.spec

    @property
    def label(self) -> str:
        return "none" if self.spec.method.name == "none" else self.spec.label

    @property
    def name(self) -> str:
        """The checkpoint, and its scaling."""
        return self.checkpoint.name + f", {self.label}" * (self.label != "none")

    def patch(self, model: "PreTrainedModel") -> bool:
        """Apply the plan, if any, in memory. Return whether the frequencies then follow the length.

        Raises PatchError; ProofError if config.json is not read as transformers reads it.
        """
        if self.plan is None:
            return False
        require_reading(self.checkpoint.config, model)
        live_patch(model, self.plan.positions.ropes)
        return any(varies_with_length(rope) for rope in self.plan.positions.ropes.values())

    @cached_property
    def identity(self) -> Identity:
        """What makes it the same model as another."""
        return identity_of(self.checkpoint, self.plan.positions if self.plan else None)


def open_subjects(
    names: Sequence[str],
    specs: Sequence[ScalingSpec | None] | None,
    options: Mapping[str, Any],
    *,
    weights: bool = True,
) -> list[Subject]:
    """Open every checkpoint with every scaling, each model once.

    The others are compared with the first: the baseline, else an unscaled one, else the first given. specs: None for
    checkpoints as they are. options: baseline, original_length, revision, attn. weights: whether a Hub id's weights are
    needed. Shows the findings. Raises MethodError, CheckpointError.
    """
    names, revision, baseline = list(dict.fromkeys(names)), options["revision"], options["baseline"]
    if revision and len(names) > 1:
        raise MethodError("--revision works with one checkpoint only.")
    specs = list(specs or [None])
    if len(specs) > 1:  # what scales nothing needs no length
        specs = [make_spec(spec.method.name) if spec and spec.method.name in LENGTH_ONLY else spec for spec in specs]
    needed: dict[str, Any] = {"weights": weights, "tokenizer": True, "adapters": True}
    opened = [open_checkpoint(name, revision=revision, **needed) for name in names]
    length = options["original_length"]
    subjects = [
        Subject(checkpoint, make_plan(checkpoint, spec, original_length=length, in_memory=True) if spec else None)
        for checkpoint in opened
        for spec in specs
    ]
    first = next((subject for subject in subjects if subject.label == "none"), subjects[0])
    if baseline is not None:
        named = Subject(open_checkpoint(baseline, **needed))
        known = (each for each in (*subjects, *map(Subject, opened)) if each.identity == named.identity)
        first = replace(next(known, named), is_baseline=True)  # the same checkpoint is loaded once
    subjects = _once([first, *subjects])
    if baseline is not None and len(subjects) == 1:
        raise MethodError(f"--baseline {baseline} is the same model as {names[0]}. Remove it, or name another.")
    for subject in subjects:
        remaps = read_state(subject.checkpoint).saved_remapping or (subject.plan and subject.plan.remapping)
        if options["attn"] != "auto" and remaps:
            raise MethodError(f"--attn {options['attn']} would replace the attention of {subject.name}. Remove --attn.")
    _show_findings(subjects, several=len(specs) > 1)
    return subjects


def _once(subjects: Sequence[Subject]) -> list[Subject]:
    """Each model once, by its identity. Says which one stands under another name too."""
    known: dict[Identity, Subject] = {}
    for subject in subjects:
        first = known.setdefault(subject.identity, subject)
        if first.name != subject.name:
            say(f"{subject.name} is the same model as {first.name}, and is measured once.")
    return list(known.values())


def _show_findings(subjects: Sequence[Subject], *, several: bool) -> None:
    """several: whether of several methods, of which only what is wrong with the files is shown."""
    messages = [
        finding.message
        for subject in subjects
        for finding in (subject.plan.findings_in_memory if subject.plan else read_state(subject.checkpoint).findings)
        if not several or (subject.plan and finding.record.about == "files")
    ]
    for checkpoint in {id(subject.checkpoint): subject.checkpoint for subject in subjects}.values():
        shipped = read_state(checkpoint).positions.main.spec
        plans = [subject.plan for subject in subjects if subject.checkpoint is checkpoint]
        if shipped.method.name != "none" and all(plan and plan.spec.method != shipped.method for plan in plans):
            messages.append(
                f"{checkpoint.name} ships with {shipped.method} ×{shipped.factor:g}, which every method here replaces. "
                f"To measure it too, add {AS_IS} to --methods."
            )
    for message in dict.fromkeys(messages):
        warn(message)


def _is_large_and_half(checkpoint: Checkpoint) -> bool:
    """Return whether config.json names a dtype of half precision, and the weights are large enough to be slow."""
    config = checkpoint.config
    dtypes = {part.get(key) for part in (config, section_of(config)) for key in ("dtype", "torch_dtype")}
    is_large = sum(file.stat().st_size for file in checkpoint.weight_files()) >= _LARGE
    return is_large and bool(dtypes & {"bfloat16", "float16"})


class ReaderFactory:
    """Opens a reader for each subject. loads_weights: whether it needs the checkpoint's weights."""

    loads_weights = True

    def request(self) -> dict[str, Any]:
        """The settings on which the numbers depend."""
        raise NotImplementedError

    @property
    def settings(self) -> dict[str, Any]:
        """For the report."""
        return {**self.request(), "attn": "auto"}

    def check(self, subjects: Sequence[Subject]) -> None:
        """Raises MethodError for subjects that cannot be read."""

    def open(
        self, subject: Subject, tokenizer: Any, scalings: Sequence[Subject] = ()
    ) -> AbstractContextManager[Reader]:
        """Yield a reader. scalings: all subjects of this checkpoint."""
        raise NotImplementedError


class LiveReaderFactory(ReaderFactory):
    """Opens a reader for each subject: one model in memory at a time, loaded once for the scalings of a checkpoint.

    loading: see load_model; with dtype 'auto', a CPU with bfloat16 arithmetic computes in bfloat16 with weights of half
    precision, but for small models. exact: not so. chunk, batch_size: see LiveReader.
    """

    def __init__(
        self, loading: Mapping[str, Any], *, chunk: int | None = None, batch_size: int = 1, exact: bool = False
    ) -> None:
        self.loading, self.chunk, self.batch_size, self.exact = loading, chunk, batch_size, exact
        self._loaded: tuple[Checkpoint, PreTrainedModel] | None = None

    @cached_property
    def _in_bfloat16(self) -> bool:
        if self.exact or self.loading.get("dtype", "auto") != "auto" or not computes_bfloat16():
            return False
        return choose_device(self.loading.get("device", "auto")) == "cpu"

    def release(self) -> None:
        """Free the model that was read last."""
        self._loaded = None

    def request(self) -> dict[str, Any]:
        dtype, device = resolve_dtype_and_device(self.loading.get("dtype", "auto"), self.loading.get("device", "auto"))
        dtype = "by checkpoint" if self._in_bfloat16 else dtype
        used = {"dtype": dtype, "device": device.partition(":")[0], "versions": environment()}
        return {**used, "chunk": self.chunk, **self.settings}

    @property
    def settings(self) -> dict[str, Any]:
        given = {key: self.loading[key] for key in ("attn", "bits") if key in self.loading}
        return {"batch_size": self.batch_size, "attn": "auto", **given}

    @contextlib.contextmanager
    def open(self, subject: Subject, tokenizer: Any, scalings: Sequence[Subject] = ()) -> Iterator[LiveReader]:
        """Yield a reader; the model is unpatched afterwards.

        Warns of a tokenizer with another vocabulary, of unused weights, and, without a plan, of rotary tables that
        differ from the checkpoint's files.

        scalings: all subjects of this checkpoint, tried before the first is measured. Raises CheckpointError, and
        PatchError if the model does not support one of them.
        """
        if self._loaded is None or self._loaded[0] is not subject.checkpoint:
            self._loaded = None  # free its memory first
            loading = dict(self.loading)
            if self._in_bfloat16 and _is_large_and_half(subject.checkpoint):
                say(f"Reading {subject.checkpoint.name} in bfloat16 on the CPU. --dtype float32 rounds less.")
                loading["dtype"] = "bfloat16"
            with progress_bar(f"loading {subject.checkpoint.name}", None):
                model = load_model(subject.checkpoint, say=warn, **loading)
            self._loaded = subject.checkpoint, model
            if mismatch := vocabulary_mismatch(tokenizer, model):
                warn(mismatch)
            for scaling in scalings:
                with unpatched_after(model):
                    scaling.patch(model)
        model = self._loaded[1]
        with unpatched_after(model):
            follows = subject.patch(model)
            if subject.plan is None:
                for difference in check_tables(model, subject.checkpoint).differences:
                    warn(difference)
            yield LiveReader(model, chunk=self.chunk, batch_size=self.batch_size, follows_length=follows)
