"""ropecli needle: whether a model finds a key in a text of the user's choice, by length and depth."""

from typing import Annotated, Any

import typer

from ropecli.cli import evaluation, options, retrieval, scaling

_CODE = ("demo", "demo-train")


def command(
    checkpoint: options.Checkpoint,
    data: Annotated[
        str,
        typer.Option("--data", "-d", help="The text between: 'demo', a file or folder of text or rows, or a Hub id."),
    ] = "demo",
    lengths: retrieval.Lengths = retrieval.LENGTHS,
    depths: retrieval.Depths = retrieval.DEPTHS,
    trials: retrieval.Trials = 5,
    style: Annotated[
        str | None,
        typer.Option(
            help="code: AMBER_KEY = 48213 among lines of source, asked by `AMBER_KEY =`. prose: a sentence and "
            "a question. Else code for the data 'demo' and 'demo-train', which are source, and prose for other data."
        ),
    ] = None,
    needle: Annotated[
        str | None,
        typer.Option(metavar="TEMPLATE", help="A line of your own with {key}, and {name} where there are --keys."),
    ] = None,
    question: Annotated[
        str | None,
        typer.Option(metavar="TEMPLATE", help="For --needle: the last line, which the key completes; with its {name}."),
    ] = None,
    keys: Annotated[
        int,
        typer.Option(min=1, help="Needles with different names, one asked for, the others spread evenly in the text."),
    ] = 1,
    mode: retrieval.Mode = "rank",
    candidates: retrieval.Candidates = None,
    seed: retrieval.Seed = 0,
    method: scaling.InMemory = None,
    factor: scaling.Factor = None,
    settings: scaling.Settings = None,
    factors_file: scaling.FactorsFile = None,
    original_length: scaling.OriginalLength = None,
    text_column: evaluation.TextColumn = "text",
    split: evaluation.Split = None,
    chunk: evaluation.Chunk = None,
    dtype: evaluation.Dtype = "auto",
    device: evaluation.Device = "auto",
    attn: evaluation.Attn = "auto",
    output: retrieval.Output = None,
    plot: retrieval.Plot = None,
    revision: options.Revision = None,
    as_json: options.AsJson = False,
) -> None:
    """Look for a needle in a text of your choice, at several lengths and depths.

    The key is a random number of five digits. A model that cannot tell several --keys apart scores 1 ÷ keys.

    Several processes, started by `accelerate launch -m ropecli needle ...`, share the prompts.
    """
    from ropecli.data.sources import read_texts
    from ropecli.evaluation.retrieval.templates import choose_templates

    request = retrieval.make_request(
        lengths,
        depths,
        mode,
        chunk,
        candidates,
        keys=keys,
        trials=trials,
        seed=seed,
        output=output,
        plot=plot,
        as_json=as_json,
    )
    default = "code" if data in _CODE else "prose"
    templates = choose_templates(style, needle, question, default)
    templates.check_keys(keys)
    subject = retrieval.open_subject(checkpoint, revision, method, factor, settings, factors_file, original_length)
    texts = read_texts(data, text_column=text_column, split=split)

    def make_task(pieces):
        return _make_task(request, templates, texts, pieces, keys)

    own = {"style": (style or default) if needle is None else None, "text_column": text_column, "split": split}
    retrieval.run(request, subject, data, make_task, own, dtype=dtype, device=device, attn=attn)


def _make_task(request: retrieval.Request, templates, texts, pieces, keys: int) -> Any:
    from ropecli.cli.progress_bar import progress_bar
    from ropecli.cli.terminal import warn
    from ropecli.evaluation.retrieval.haystack import read_haystack
    from ropecli.evaluation.retrieval.prompts import RetrievalTask

    with progress_bar("reading documents", None) as step:
        haystack = read_haystack(texts, pieces, step)
    if len(haystack.ids) < request.lengths[-1]:
        warn(f"The text has {len(haystack.ids)} tokens, and is repeated to fill {request.lengths[-1]}.")
    return RetrievalTask(
        "needle", templates, haystack, pieces, keys=keys, candidates=request.candidates, seed=request.seed
    )
