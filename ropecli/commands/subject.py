"""A checkpoint to measure and its scaling: opened, planned, loaded, patched in memory. Imports torch."""

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ropecli.attention import load_model
from ropecli.attention.patching import live_patch
from ropecli.checkpoint.opening import Checkpoint, open_checkpoint
from ropecli.checkpoint.patch_plan import PatchPlan, make_plan
from ropecli.checkpoint.state import read_state
from ropecli.commands.messages import command_line, progress_bar, warn
from ropecli.commands.options import InMemoryOptions
from ropecli.commands.scalings import method_parameters, one_spec, refuse_without_method
from ropecli.config.saved_remapping import read_saved_remapping
from ropecli.errors import MethodError
from ropecli.evaluation.comparison import plan_varies_with_length
from ropecli.live.devices import device_names
from ropecli.live.loading import ATTENTION, DEVICE_MAPS, DTYPES, vocabulary_mismatch
from ropecli.scaling.spec import ScaledRope, ScalingSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Subject:
    """A checkpoint to measure.

    spec: the scaling to report. rope: its frequencies. plan: the patch to apply in memory, or None.
    """

    checkpoint: Checkpoint
    spec: ScalingSpec
    rope: ScaledRope
    plan: PatchPlan | None
    warnings: tuple[str, ...]

    @property
    def reach(self) -> tuple[int, int]:
        """Pretraining length and context length, in tokens."""
        return reach_of(self.checkpoint, self.plan)

    def patch(self, model: "PreTrainedModel") -> bool:
        """Apply the plan, if any, in memory. Return whether the frequencies then follow the length."""
        if self.plan is None:
            return False
        live_patch(model, self.plan.ropes)
        return plan_varies_with_length(self.plan)


class SubjectOptions(InMemoryOptions, total=False):
    revision: str | None


def open_subject(name: str, options: SubjectOptions) -> Subject:
    """Open a checkpoint, unpatched without a method. Raises MethodError, CheckpointError."""
    method, factor, original_length = options.get("method"), options.get("factor"), options.get("original_length")
    settings, factors_file, revision = options.get("settings"), options.get("factors_file"), options.get("revision")
    if method is None:
        params = method_parameters("none", settings, factors_file)
        refuse_without_method(factor, params or None, original_length)
        return subject_as_is(open_checkpoint(name, weights=True, revision=revision, adapters=True))
    spec = one_spec(method, factor, settings, factors_file)
    checkpoint = open_checkpoint(name, weights=True, revision=revision, adapters=True)
    plan = make_plan(checkpoint, spec, original_length=original_length)
    return Subject(checkpoint, plan.spec, plan.ropes[plan.scaled[0]], plan, plan.scaling_warnings)


def subject_as_is(checkpoint: Checkpoint) -> Subject:
    state = read_state(checkpoint)
    return Subject(checkpoint, state.main.spec, state.main, None, state.warnings)


def reach_of(checkpoint: Checkpoint, plan: PatchPlan | None) -> tuple[int, int]:
    """Pretraining length and context length in tokens, with the patch `plan` if there is one."""
    if plan is None:
        state = read_state(checkpoint)
        return state.pretraining_length, state.context_length
    return plan.ropes[plan.scaled[0]].geometry.original_max_position_embeddings, plan.target_length


def refuse_attention(checkpoint: Checkpoint, plan: PatchPlan | None, attn: str) -> None:
    """Raises MethodError if --attn would replace the attention of a distance method.

    Raises CheckpointError for an incomplete distance method in config.json.
    """
    saved = read_saved_remapping(checkpoint.config)
    if attn == "auto":
        return
    if plan is not None and plan.remaps:
        raise MethodError(f"--attn {attn} would replace the attention of {plan.spec.method}. Remove --attn.")
    if saved is not None:
        raise MethodError(
            f"--attn {attn} would replace the attention of {checkpoint.name}, which is {saved.method}. Remove --attn."
        )


def fingerprint(plan: PatchPlan | None) -> str | None:
    """Hash a plan's ropes, to the bit. None for no plan."""
    if plan is None:
        return None
    sha = hashlib.sha256()
    for label, rope in plan.ropes.items():
        sha.update(repr((label, rope.geometry, rope.spec, rope.attention_factor)).encode())
        if rope.remapping is not None:
            sha.update(repr((rope.remapping.params, rope.remapping.pretrained, rope.remapping.target)).encode())
        sha.update(rope.inv_freq.tobytes())
    return sha.hexdigest()


def load(
    checkpoint: Checkpoint,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    whole: bool = False,
    **loading: Any,
) -> "PreTrainedModel":
    """Load the checkpoint's model. Warns about a tokenizer with another vocabulary and about unused weights.

    whole: refuse unused weights. loading: see load_model. Raises MethodError for an unknown dtype, attention or device
    map, CheckpointError.
    """
    for key, known in (("dtype", DTYPES), ("attn", ATTENTION), ("device_map", DEVICE_MAPS)):
        if (value := loading.get(key)) is not None and value not in known:
            raise MethodError(f"--{key.replace('_', '-')} is {value!r}; expected one of {', '.join(known)}.")
    with progress_bar(f"loading {checkpoint.name}", None):
        model = load_model(checkpoint, say=None if whole else warn, **loading)
    if mismatch := vocabulary_mismatch(tokenizer, model):
        warn(mismatch)
    return model


def base_report(subject: Subject, source: str, model: "PreTrainedModel") -> dict[str, Any]:
    """Return the fields that all evaluation reports have."""
    return {
        "checkpoint": subject.checkpoint.name,
        "digest": subject.checkpoint.digest(),
        "method": subject.spec.method.name,
        "factor": subject.spec.factor,
        "params": dict(subject.spec.params),
        "in_memory": subject.plan is not None,
        "original_max_position_embeddings": subject.rope.geometry.original_max_position_embeddings,
        "source": source,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": device_names(model),
        "command": list(command_line.get()),
    }
