"""What the evaluations share: their options, and how they come by a model and its documents."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

Data = Annotated[
    str, typer.Option("--data", "-d", help="'demo', a file or folder of text or rows, or a Hub dataset id.")
]
Lengths = Annotated[str, typer.Option("--lengths", "-l", help="Context lengths in tokens, as 256,512,1024.")]
ProtocolName = Annotated[
    str,
    typer.Option(
        "--protocol",
        help="prefix: the first N tokens of each document, from one pass. tail: the same target tokens, read with N "
        "tokens of context each. sliding: whole documents by windows of N, --stride apart. disjoint: windows side by "
        "side, as lm-eval's rolling likelihood. yarn: as YaRN's script, for its tables alone.",
    ),
]
Stride = Annotated[int | None, typer.Option(min=1, help="sliding: tokens between windows; else half of each length.")]
Targets = Annotated[
    int | None, typer.Option(min=1, help="tail: tokens scored per document; else half the shortest length.")
]
MaxDocuments = Annotated[int | None, typer.Option(min=1, help="Read at most so many documents.")]
MinTokens = Annotated[
    int | None, typer.Option(min=2, help="sliding, disjoint, yarn: leave out documents with fewer tokens.")
]
MaxTokens = Annotated[
    int | None, typer.Option(min=2, help="sliding, disjoint, yarn: read at most so many tokens of each document.")
]
TextColumn = Annotated[str, typer.Option(help="The column that holds the text, in tables.")]
Split = Annotated[str | None, typer.Option(help="The split of a Hub dataset; else test, validation or train.")]
Dtype = Annotated[str, typer.Option(help="auto (float32 on a CPU, bfloat16 elsewhere), float32, bfloat16, float16.")]
Device = Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda, cuda:1, mps.")]
Attn = Annotated[
    str, typer.Option(help="auto (as transformers chooses), sdpa, eager, flash_attention_2 or _3, flex_attention.")
]
Chunk = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Tokens read at once, those before them being in a KV cache: less memory, more time. 0: all. By default "
        "all up to 32,768, and beyond that 1,024.",
    ),
]
BatchSize = Annotated[int, typer.Option(min=1, help="Windows of the same length in one forward pass.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with an interrupted run of the same --output; nothing is scored twice.")
]
_LONG = 32_768
_CHUNK_OF_LONG = 1024


def load(checkpoint, tokenizer, dtype: str, device: str, attn: str, *, whole: bool = False):
    """The checkpoint's model; warns of a tokenizer of another vocabulary, and of weights that config.json does not use.

    whole: refuse such weights. Raises MethodError for an unknown dtype or attention, CheckpointError.
    """
    from ropecli.attention import load_model
    from ropecli.cli.terminal import warn
    from ropecli.errors import MethodError
    from ropecli.live.loading import ATTENTION, DTYPES, vocabulary_mismatch

    for option, value, known in (("--dtype", dtype, DTYPES), ("--attn", attn, ATTENTION)):
        if value not in known:
            raise MethodError(f"{option} is {value!r}; it must be one of {', '.join(known)}.")
    model = load_model(checkpoint, dtype=dtype, device=device, attn=attn, say=None if whole else warn)
    if mismatch := vocabulary_mismatch(tokenizer, model):
        warn(mismatch)
    return model


def prepare(
    checkpoint,
    source: str,
    lengths: list[int],
    protocol,
    *,
    reading: dict[str, Any],
    before: "Sequence[Run]" = (),
    **others: Any,
) -> "Run":
    """A Run on the documents of `source`, by the checkpoint's tokenizer. reading: of read_data; others: Run's.

    before: other checkpoints' runs of the same request. Sizes of one model share a tokenizer, and so the documents.
    """
    from ropecli.live.loading import load_tokenizer

    tokenizer = load_tokenizer(checkpoint)
    for run in before:
        if tokenizer.is_fast and _is_the_same(tokenizer, run.tokenizer):
            return run
    documents = read_data(tokenizer, source, lengths, protocol, **reading)
    protocol = protocol.settled(lengths, documents.special)
    return Run(tokenizer, documents, documents.fingerprint(), source, lengths, protocol, **others)


def _is_the_same(tokenizer, other) -> bool:
    if not other.is_fast:
        return False
    return tokenizer.backend_tokenizer.to_str() == other.backend_tokenizer.to_str() and (
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer("")["input_ids"],
    ) == (other.bos_token_id, other.eos_token_id, other("")["input_ids"])


def chunk_size(asked: int | None, longest: int) -> int | None:
    """Tokens to read at once in windows of `longest` tokens; None for all."""
    if asked is None:
        return _CHUNK_OF_LONG if longest > _LONG else None
    return asked or None


def read_data(
    tokenizer,
    data: str,
    lengths: list[int],
    protocol,
    *,
    min_tokens: int | None = None,
    max_tokens: int | None = None,
    max_documents: int | None = None,
    text_column: str = "text",
    split: str | None = None,
):
    """The documents of `data` that `protocol` can score at these lengths; says how many were left out."""
    from ropecli.cli.progress_bar import progress_bar
    from ropecli.cli.terminal import warn
    from ropecli.data.documents import read_documents, special_tokens
    from ropecli.data.sources import read_texts
    from ropecli.errors import DataError

    whole = protocol.reads_whole_documents
    if not whole and (min_tokens or max_tokens):
        raise DataError(f"--min-tokens and --max-tokens are for whole documents; {protocol.name} reads what it scores.")
    special = special_tokens(tokenizer)
    least = (min_tokens or special.first_scored + 1 + len(special.suffix)) if whole else lengths[-1]
    texts = read_texts(data, text_column=text_column, split=split)
    with progress_bar("reading documents", None) as step:
        documents = read_documents(
            texts,
            tokenizer,
            least,
            most=max_documents,
            cut=max_tokens if whole else lengths[-1],
            count_bytes=True,
            advance=step,
        )
    if documents.too_short:
        warn(f"{documents_are(documents.too_short)} shorter than {least} tokens and left out.")
    if shorter := sum(len(document.ids) < lengths[-1] for document in documents.kept):
        warn(
            f"{documents_are(shorter)} shorter than {lengths[-1]} tokens: scored, with less before them than asked for."
        )
    return documents


def documents_are(count: int) -> str:
    return "1 document is" if count == 1 else f"{count} documents are"


@contextlib.contextmanager
def interruptible(output: Path | None) -> Iterator[None]:
    """Lets SIGTERM and SIGHUP end a run as Ctrl-C does: its lock is removed. Says how to resume it.

    output: beside which the run saves its progress; None where it saves none. Raises RopecliError where another of its
    processes ended.
    """
    from ropecli.cli.terminal import warn
    from ropecli.evaluation.processes import among_processes
    from ropecli.resume import state_folder
    from ropecli.signals import terminated_by_signals

    again = f"Progress is saved beside {output}: run the same command with --resume to continue."
    try:
        with terminated_by_signals(), among_processes(again if output else "Start all processes again."):
            yield
    except (KeyboardInterrupt, SystemExit):
        if output and state_folder(output).exists():
            warn(f"Stopped. {again}")
        raise


@dataclass(frozen=True)
class Run:
    """What is measured on which documents, and how; the same for every model of one command.

    protocol: settled for the lengths. chunk: tokens; None for all at once. loading: of `load`.
    """

    tokenizer: Any
    documents: Any
    fingerprint: str
    source: str
    lengths: list[int]
    protocol: Any
    chunk: int | None
    batch_size: int
    loading: dict[str, Any]
    workers: Any

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
        """What must be the same for a run to be gone on with: all that the numbers depend on."""
        from ropecli.evaluation.eval_report import environment
        from ropecli.live.loading import settle

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
    def scoring(self, progress, switching: Sequence[bool]) -> Iterator[dict[str, Any]]:
        """Options of evaluate_perplexity, while a progress bar stands. switching: of each model or method measured."""
        from ropecli.cli.progress_bar import progress_bar
        from ropecli.cli.terminal import warn
        from ropecli.evaluation.perplexity import count_passes

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

    def report(self, checkpoint, spec, rope, model, rows, *, in_memory: bool):
        """spec: the scaling as it was asked for; rope: the one that it gave."""
        from ropecli.evaluation.eval_report import EvalReport

        return EvalReport(
            checkpoint=checkpoint.name,
            digest=checkpoint.digest(),
            method=spec.method.name,
            factor=spec.factor,
            params=dict(spec.params),
            in_memory=in_memory,
            original_max_position_embeddings=rope.geometry.original_max_position_embeddings,
            source=self.source,
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(model.device),
            command=command_line(),
            protocol=self.protocol.name,
            settings=self.settings,
            fingerprint=self.fingerprint,
            too_short=self.documents.too_short,
            rows=rows,
            document_names=[document.name for document in self.documents.kept],
        )


def command_line() -> list[str]:
    """What was typed, but for the folder that the program lies in."""
    return ["ropecli", *sys.argv[1:]]
