"""A perplexity run: reads the documents, scores them, makes the report. Imports torch."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropecli.checkpoint.opening import Checkpoint
from ropecli.commands.longppl import get_keys, read_marked, refuse_key_options
from ropecli.commands.messages import progress_bar, say, warn
from ropecli.commands.options import DocumentOptions, with_config
from ropecli.commands.subject import Subject, base_report
from ropecli.data.documents import Documents, read_documents, special_tokens
from ropecli.data.sources import HUB_DOCUMENTS, Texts, is_hub_dataset, read_texts
from ropecli.errors import DataError
from ropecli.evaluation.eval_report import EvalReport, loading_request, weight_settings
from ropecli.evaluation.longppl import Keys
from ropecli.evaluation.perplexity import count_passes
from ropecli.evaluation.processes import Workers, among_processes
from ropecli.evaluation.protocols import Protocol
from ropecli.evaluation.results import LengthResult
from ropecli.evaluation.saved_progress import EvalProgress
from ropecli.live.loading import load_tokenizer
from ropecli.resume import state_folder
from ropecli.signals import terminated_by_signals

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_LONG = 32_768
_CHUNK_OF_LONG = 1024
_ENOUGH_DOCUMENTS = 8
_SHORTEST = 16


def chunk_size(asked: int | None, longest: int) -> int | None:
    """Tokens per forward pass, for windows of `longest` tokens. None: all at once."""
    if asked is None:
        return _CHUNK_OF_LONG if longest > _LONG else None
    return asked or None


def default_lengths(pretraining_length: int, context_length: int) -> list[int]:
    """Lengths to measure, in tokens: doubling from a quarter of the pretraining length to the context length."""
    lengths = [max(_SHORTEST, pretraining_length // 4)]
    while 2 * lengths[-1] <= context_length:
        lengths.append(2 * lengths[-1])
    return lengths if lengths[-1] >= context_length else [*lengths, context_length]


@dataclass(frozen=True)
class DataChoice:
    """Which documents to read from a source. min_tokens, max_tokens: for protocols that read whole documents."""

    source: str
    text_column: str = "text"
    split: str | None = None
    max_documents: int | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None

    @classmethod
    def of(cls, options: DocumentOptions) -> "DataChoice":
        return cls(
            with_config(options["data"], options["dataset_config"]),
            options["text_column"],
            options["split"],
            options["max_documents"],
            options["min_tokens"],
            options["max_tokens"],
        )

    def texts(self, *, whole: bool | None = None) -> Texts:
        """whole: read all of a Hub dataset; default: only with --max-documents."""
        whole = reads_everything(self.source, self.max_documents) if whole is None else whole
        return read_texts(self.source, text_column=self.text_column, split=self.split, whole=whole)

    def read(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        lengths: list[int],
        protocol: Protocol,
        *,
        drop_rare: bool = False,
        texts: Texts | None = None,
        keep_spans: bool = False,
    ) -> tuple[Documents, list[int]]:
        """Reads the documents that `protocol` can score at these lengths; warns about those that it skips.

        drop_rare: drop the longest lengths that fewer than 8 documents have. texts: default: all. keep_spans: see
        read_documents. Returns the remaining lengths too.
        """
        whole = protocol.reads_whole_documents
        if not whole and (self.min_tokens or self.max_tokens):
            raise DataError(
                f"--min-tokens and --max-tokens apply to whole documents; {protocol.name} reads only what it scores."
            )
        special = special_tokens(tokenizer)
        least = lengths[0] if drop_rare else lengths[-1]
        if whole:
            least = self.min_tokens or special.first_scored + 1 + len(special.suffix)
        with progress_bar("reading documents", None) as step:
            documents = read_documents(
                texts or self.texts(),
                tokenizer,
                least,
                most=self.max_documents,
                cut=self.max_tokens if whole else lengths[-1],
                count_bytes=True,
                keep_spans=keep_spans,
                advance=step,
            )
        if drop_rare:
            lengths = _common_lengths(documents, lengths)
            if not whole:
                least = lengths[-1]
                documents = documents.at_least(least)
        if documents.too_short:
            warn(f"Skipping {count_documents(documents.too_short)} shorter than {least} tokens.")
        if shorter := sum(len(document.ids) < lengths[-1] for document in documents.kept):
            warn(f"{count_documents(shorter)} shorter than {lengths[-1]} tokens: scored with less context.")
        return documents, lengths


def reads_everything(source: str, max_documents: int | None) -> bool:
    """Return whether to read on until `max_documents` are found; if not, say how much of a Hub dataset is read."""
    if max_documents is None and is_hub_dataset(source):
        say(f"Reading at most {HUB_DOCUMENTS:,} documents of {source}. To read more, set --max-documents.")
    return max_documents is not None


def _common_lengths(documents: Documents, lengths: list[int]) -> list[int]:
    """The lengths that 8 documents have, or all documents if there are fewer; says which were dropped."""
    enough = min(_ENOUGH_DOCUMENTS, len(documents.kept))
    tokens = sorted((len(document.ids) for document in documents.kept), reverse=True)
    kept = [length for length in lengths if tokens[enough - 1] >= length] or lengths[:1]
    if len(kept) < len(lengths):
        having = sum(count >= lengths[len(kept)] for count in tokens)
        say(
            f"Measuring up to {kept[-1]} tokens: only {count_documents(having)} of {documents.count} have "
            f"{lengths[len(kept)]}. Longer lengths: --lengths."
        )
    return kept


def count_documents(count: int) -> str:
    return f"{count} document{'s'[: count != 1]}"


@dataclass(frozen=True)
class PerplexityRun:
    """Documents and settings of a measurement, the same for every model of a command.

    protocol: resolved for the lengths. chunk: tokens, None for all at once. loading: see load_model. keys: for the
    protocol longppl.
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
    keys: Keys | None = None

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "stride": self.protocol.stride,
            "targets": self.protocol.targets,
            "chunk": self.chunk,
            "batch_size": self.batch_size,
            "attn": self.loading["attn"],
            "processes": self.workers.count,
            **weight_settings(self.loading),
            **({"keys": self.keys.settings} if self.keys else {}),
        }

    def request(self) -> dict[str, Any]:
        """Everything that the numbers depend on. A run resumes only with the same."""
        return {
            "protocol": self.protocol.name,
            "stride": self.protocol.stride,
            "targets": self.protocol.targets,
            "lengths": self.lengths,
            "documents": len(self.documents.kept),
            "data": self.fingerprint,
            **loading_request(self.loading),
        }

    @contextlib.contextmanager
    def scoring(self, progress: EvalProgress, switching: Sequence[bool]) -> Iterator[dict[str, Any]]:
        """Options for evaluate_perplexity, with a progress bar.

        switching: for each measured model or method, whether its frequencies follow the length.
        """
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
    lengths: Sequence[int] | None,
    protocol: Protocol,
    *,
    reach: tuple[int, int],
    chunk: int | None,
    batch_size: int,
    loading: dict[str, Any],
    workers: Workers,
    before: Sequence[PerplexityRun] = (),
    evaluator: str | None = None,
    key_file: str | Path | None = None,
) -> PerplexityRun:
    """A run on the documents of `data`, read with the checkpoint's tokenizer.

    lengths: None for the default lengths, which follow from `reach`: pretraining length and context length. before:
    other checkpoints' runs of the same request, whose lengths are taken. Sizes of one model share a tokenizer, and so
    the documents. evaluator, key_file: for the protocol longppl.
    """
    refuse_key_options(protocol, evaluator, key_file)
    tokenizer = load_tokenizer(checkpoint)
    for run in before:
        if tokenizer.is_fast and _is_the_same(tokenizer, run.tokenizer):
            return run
    if lengths is None and before:
        lengths = before[0].lengths
    wanted = default_lengths(*reach) if lengths is None else sorted(set(lengths))
    keys = before[0].keys if before else None
    if protocol.name == "longppl":
        if keys is None:
            passes = {"chunk": chunk_size(chunk, wanted[-1]), "batch_size": batch_size}
            keys, wanted = get_keys(
                evaluator,
                key_file,
                data,
                wanted,
                drop_rare=lengths is None,
                loading=loading,
                workers=workers,
                **passes,
            )
        documents = read_marked(data, tokenizer, keys)
    else:
        documents, wanted = data.read(tokenizer, wanted, protocol, drop_rare=lengths is None)
    protocol = protocol.settled(wanted, documents.special)
    chunk = chunk_size(chunk, wanted[-1])
    return PerplexityRun(
        tokenizer,
        documents,
        documents.fingerprint(),
        data.source,
        wanted,
        protocol,
        chunk,
        batch_size,
        loading,
        workers,
        keys,
    )


@contextlib.contextmanager
def interruptible(output: Path | None) -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a run as Ctrl-C does, and print how to resume it.

    output: the run saves its progress next to it; None if it saves none. Raises RopecliError if another process of the
    run ended.
    """
    again = f"Progress is saved next to {output}. Run the same command with --resume to continue."
    try:
        with terminated_by_signals(), among_processes(again if output else "Start all processes again."):
            yield
    except (KeyboardInterrupt, SystemExit):
        if output and state_folder(output).exists():
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
