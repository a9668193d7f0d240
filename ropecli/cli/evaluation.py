"""What eval-ppl and compare share: their options, and how they come by a model and its documents."""

from typing import Annotated

import typer

Data = Annotated[
    str, typer.Option("--data", "-d", help="'demo', a file or folder of text or rows, or a Hub dataset id.")
]
Lengths = Annotated[str, typer.Option("--lengths", "-l", help="Context lengths in tokens, as 256,512,1024.")]
Protocol = Annotated[
    str,
    typer.Option(
        help="prefix: the first N tokens of each document, from one pass. tail: the same target tokens, read with N "
        "tokens of context each."
    ),
]
MaxDocuments = Annotated[int | None, typer.Option(min=1, help="Read at most so many documents.")]
TextColumn = Annotated[str, typer.Option(help="The column that holds the text, in tables.")]
Split = Annotated[str | None, typer.Option(help="The split of a Hub dataset; else test, validation or train.")]
Dtype = Annotated[str, typer.Option(help="auto (float32 on a CPU, bfloat16 elsewhere), float32, bfloat16, float16.")]
Device = Annotated[str, typer.Option(help="auto (the first GPU if there is one), cpu, cuda, cuda:1, mps.")]


def load(checkpoint, dtype: str, device: str):
    """The checkpoint's model. Raises MethodError for an unknown dtype."""
    from ropecli.errors import MethodError
    from ropecli.evaluate.loading import DTYPES, load_model

    if dtype not in DTYPES:
        raise MethodError(f"--dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}.")
    return load_model(checkpoint, dtype=dtype, device=device)


def read_data(checkpoint, data: str, length: int, most: int | None, text_column: str, split: str | None):
    """The documents of `data` with at least `length` tokens; says how many were shorter."""
    from ropecli.cli.progress import progress_bar
    from ropecli.cli.terminal import warn
    from ropecli.data.documents import read_documents
    from ropecli.data.sources import read_texts
    from ropecli.evaluate.loading import load_tokenizer

    tokenizer = load_tokenizer(checkpoint)
    texts = read_texts(data, text_column=text_column, split=split)
    with progress_bar("reading documents", None) as step:
        documents = read_documents(texts, tokenizer, length, most=most, truncate=True, advance=lambda name: step())
    if documents.too_short:
        warn(f"{documents.too_short} documents are shorter than {length} tokens and were left out.")
    return documents


def make_report(checkpoint, spec, rope, *, protocol: str, source: str, documents, model, rows, in_memory: bool):
    """spec: the scaling as it was asked for; rope: the one that it gave."""
    from ropecli.evaluate.report import EvalReport

    return EvalReport(
        checkpoint=checkpoint.name,
        digest=checkpoint.digest(),
        method=spec.method,
        factor=spec.factor,
        params=dict(spec.params),
        protocol=protocol,
        source=source,
        fingerprint=documents.fingerprint(max(row.length for row in rows)),
        too_short=documents.too_short,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        rows=rows,
        document_names=[document.name for document in documents.kept],
        in_memory=in_memory,
        original_max_position_embeddings=rope.geometry.original_max_position_embeddings,
    )
