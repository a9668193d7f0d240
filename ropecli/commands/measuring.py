"""What the evaluations share: a checkpoint with the scaling to measure, its documents, and one run over them.

Loads torch; the commands import it when they run.
"""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropecli.attention import load_model
from ropecli.attention.patching import live_patch
from ropecli.checkpoint.opening import Checkpoint, open_checkpoint
from ropecli.checkpoint.patch_plan import PatchPlan, make_plan
from ropecli.checkpoint.state import read_state
from ropecli.commands.messages import command_line, progress_bar, warn
from ropecli.commands.scalings import method_parameters, one_spec, refuse_without_method
from ropecli.config.saved_remapping import read_saved_remapping
from ropecli.data.documents import Documents, read_documents, special_tokens
from ropecli.data.sources import read_texts
from ropecli.errors import DataError, MethodError
from ropecli.evaluation.comparison import plan_varies_with_length
from ropecli.evaluation.eval_report import EvalReport, environment
from ropecli.evaluation.perplexity import count_passes
from ropecli.evaluation.processes import Workers, among_processes
from ropecli.evaluation.protocols import Protocol
from ropecli.evaluation.results import LengthResult
from ropecli.evaluation.saved_progress import EvalProgress, has_progress
from ropecli.live.loading import ATTENTION, DTYPES, load_tokenizer, settle, vocabulary_mismatch
from ropecli.scaling.spec import ScaledRope, ScalingSpec
from ropecli.signals import terminated_by_signals

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_LONG = 32_768
_CHUNK_OF_LONG = 1024


@dataclass(frozen=True)
class Subject:
    """A checkpoint to measure. spec: the scaling to report. rope: what it gives. plan: to patch by, in memory; None for
    the checkpoint as it is.
    """

    checkpoint: Checkpoint
    spec: ScalingSpec
    rope: ScaledRope
    plan: PatchPlan | None
    warnings: tuple[str, ...]

    def patch(self, model: "PreTrainedModel") -> bool:
        """Patches the model in memory, where there is a plan; whether its frequencies then follow the length."""
        if self.plan is None:
            return False
        live_patch(model, self.plan.ropes)
        return plan_varies_with_length(self.plan)


def open_subject(
    name: str,
    revision: str | None = None,
    method: str | None = None,
    factor: float | None = None,
    settings: Mapping[str, Any] | None = None,
    factors_file: str | Path | None = None,
    original_length: int | None = None,
) -> Subject:
    """Without a method, the checkpoint as it is. Raises MethodError, CheckpointError."""
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


def refuse_attention(checkpoint: Checkpoint, plan: PatchPlan | None, attn: str) -> None:
    """Raises MethodError where another attention was asked for than that of the method, which brings its own.

    plan: None for the checkpoint as it is. Raises CheckpointError for half of such a method in config.json.
    """
    saved = read_saved_remapping(checkpoint.config)
    if attn == "auto":
        return
    if plan is not None and plan.remaps:
        raise MethodError(f"--attn is {attn!r}, and {plan.spec.method} is an attention of its own. Leave --attn out.")
    if saved is not None:
        raise MethodError(
            f"--attn is {attn!r}, and {checkpoint.name} attends by {saved.method}, which it would do away with. "
            "Leave --attn out."
        )


def fingerprint(plan: PatchPlan | None) -> str | None:
    """sha256 of the ropes that a plan gives, to the bit; None for a checkpoint as it is."""
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
    dtype: str,
    device: str,
    attn: str,
    whole: bool = False,
) -> "PreTrainedModel":
    """The checkpoint's model; warns of a tokenizer of another vocabulary, and of weights that config.json does not use.

    whole: refuse such weights. Raises MethodError for an unknown dtype or attention, CheckpointError.
    """
    for option, value, known in (("--dtype", dtype, DTYPES), ("--attn", attn, ATTENTION)):
        if value not in known:
            raise MethodError(f"{option} is {value!r}; it must be one of {', '.join(known)}.")
    model = load_model(checkpoint, dtype=dtype, device=device, attn=attn, say=None if whole else warn)
    if mismatch := vocabulary_mismatch(tokenizer, model):
        warn(mismatch)
    return model


def chunk_size(asked: int | None, longest: int) -> int | None:
    """Tokens to read at once in windows of `longest` tokens; None for all."""
    if asked is None:
        return _CHUNK_OF_LONG if longest > _LONG else None
    return asked or None


@dataclass(frozen=True)
class DataChoice:
    """Which documents to read from a source. min_tokens, max_tokens: for protocols that read whole documents."""

    source: str
    text_column: str = "text"
    split: str | None = None
    max_documents: int | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None

    def read(self, tokenizer: "PreTrainedTokenizerBase", lengths: Sequence[int], protocol: Protocol) -> Documents:
        """The documents that `protocol` can score at these lengths; warns of those that were left out."""
        whole = protocol.reads_whole_documents
        if not whole and (self.min_tokens or self.max_tokens):
            raise DataError(
                f"--min-tokens and --max-tokens are for whole documents; {protocol.name} reads what it scores."
            )
        special = special_tokens(tokenizer)
        least = lengths[-1]
        if whole:
            least = self.min_tokens or special.first_scored + 1 + len(special.suffix)
        texts = read_texts(self.source, text_column=self.text_column, split=self.split)
        with progress_bar("reading documents", None) as step:
            documents = read_documents(
                texts,
                tokenizer,
                least,
                most=self.max_documents,
                cut=self.max_tokens if whole else lengths[-1],
                count_bytes=True,
                advance=step,
            )
        if documents.too_short:
            warn(f"{documents_are(documents.too_short)} shorter than {least} tokens and left out.")
        if shorter := sum(len(document.ids) < lengths[-1] for document in documents.kept):
            warn(
                f"{documents_are(shorter)} shorter than {lengths[-1]} tokens: scored, with less before them than asked "
                "for."
            )
        return documents


def documents_are(count: int) -> str:
    return "1 document is" if count == 1 else f"{count} documents are"


@dataclass(frozen=True)
class PerplexityRun:
    """What is measured on which documents, and how; the same for every model of one command.

    protocol: settled for the lengths. chunk: tokens; None for all at once. loading: dtype, device, attn.
    """

    tokenizer: Any
    documents: Documents
    fingerprint: str
    source: str
    lengths: list[int]
    protocol: Protocol
    chunk: int | None
    batch_size: int
    loading: dict[str, Any]
    workers: Workers

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "stride": self.protocol.stride,
            "targets": self.protocol.targets,
            "chunk": self.chunk,
            "batch_size": self.batch_size,
            "attn": self.loading["attn"],
            "processes": self.workers.count,
        }

    def request(self) -> dict[str, Any]:
        """What must be the same for a run to be resumed: all that the numbers depend on."""
        dtype, device = settle(self.loading["dtype"], self.loading["device"])
        return {
            "protocol": self.protocol.name,
            "stride": self.protocol.stride,
            "targets": self.protocol.targets,
            "lengths": self.lengths,
            "documents": len(self.documents.kept),
            "data": self.fingerprint,
            "dtype": dtype,
            "device": device.partition(":")[0],
            "attn": self.loading["attn"],
            "versions": environment(),
        }

    @contextlib.contextmanager
    def scoring(self, progress: EvalProgress, switching: Sequence[bool]) -> Iterator[dict[str, Any]]:
        """Options of evaluate_perplexity, while a progress bar stands. switching: of each model or method measured."""
        mine = len(self.workers.share(self.documents.kept))
        passes = sum(count_passes(self.lengths, mine, self.protocol, follows) for follows in switching)
        with progress_bar("scoring", passes) as step:
            yield {
                "protocol": self.protocol,
                "chunk": self.chunk,
                "batch_size": self.batch_size,
                "progress": progress,
                "workers": self.workers,
                "advance": step,
                "say": warn,
            }

    def report(self, subject: Subject, model: "PreTrainedModel", rows: list[LengthResult]) -> EvalReport:
        return EvalReport(
            **base_report(subject, self.source, model),
            protocol=self.protocol.name,
            settings=self.settings,
            fingerprint=self.fingerprint,
            too_short=self.documents.too_short,
            rows=rows,
            document_names=[document.name for document in self.documents.kept],
        )


def prepare_run(
    checkpoint: Checkpoint,
    data: DataChoice,
    lengths: Sequence[int],
    protocol: Protocol,
    *,
    chunk: int | None,
    batch_size: int,
    loading: dict[str, Any],
    workers: Workers,
    before: Sequence[PerplexityRun] = (),
) -> PerplexityRun:
    """A run on the documents of `data`, by the checkpoint's tokenizer.

    before: other checkpoints' runs of the same request. Sizes of one model share a tokenizer, and so the documents.
    """
    tokenizer = load_tokenizer(checkpoint)
    for run in before:
        if tokenizer.is_fast and _is_the_same(tokenizer, run.tokenizer):
            return run
    documents = data.read(tokenizer, lengths, protocol)
    protocol = protocol.settled(list(lengths), documents.special)
    chunk = chunk_size(chunk, lengths[-1])
    return PerplexityRun(
        tokenizer,
        documents,
        documents.fingerprint(),
        data.source,
        list(lengths),
        protocol,
        chunk,
        batch_size,
        loading,
        workers,
    )


def base_report(subject: Subject, source: str, model: "PreTrainedModel") -> dict[str, Any]:
    """The fields that all reports of evaluations have."""
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
        "device": str(model.device),
        "command": list(command_line.get()),
    }


@contextlib.contextmanager
def interruptible(output: Path | None) -> Iterator[None]:
    """Lets SIGTERM and SIGHUP end a run as Ctrl-C does: its lock is removed. Says how to resume it.

    output: beside which the run saves its progress; None where it saves none. Raises RopecliError where another of its
    processes ended.
    """
    again = f"Progress is saved beside {output}: run the same command with --resume to continue."
    try:
        with terminated_by_signals(), among_processes(again if output else "Start all processes again."):
            yield
    except (KeyboardInterrupt, SystemExit):
        if has_progress(output):
            warn(f"Stopped. {again}")
        raise


def _is_the_same(tokenizer: Any, other: Any) -> bool:
    if not other.is_fast:
        return False
    return tokenizer.backend_tokenizer.to_str() == other.backend_tokenizer.to_str() and (
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer("")["input_ids"],
    ) == (other.bos_token_id, other.eos_token_id, other("")["input_ids"])
