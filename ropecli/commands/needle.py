"""`ropecli needle`: measures whether a model finds a key in a text."""

from typing import TYPE_CHECKING, Annotated

from annotated_doc import Doc
from annotated_types import Ge

from ropecli.commands import options
from ropecli.commands.key_search import DEPTHS, make_search
from ropecli.commands.messages import progress_bar, warn
from ropecli.commands.options import Flag

if TYPE_CHECKING:
    from ropecli.evaluation.eval_report import RetrievalReport
    from ropecli.evaluation.retrieval.haystack import PieceTokenizer
    from ropecli.evaluation.retrieval.prompts import RetrievalTask


def needle(
    checkpoint: options.Checkpoint,
    *,
    data: Annotated[
        str,
        Flag("--data", "-d"),
        Doc("Text to hide the needle in: 'demo', a file or folder of text or rows, or a Hub id."),
        options.DATA,
    ] = "demo",
    lengths: options.PromptLengths = None,
    depths: options.Depths = DEPTHS,
    trials: options.Trials = 5,
    style: Annotated[
        str | None,
        Doc(
            "code: AMBER_KEY = 48213 among lines of source, asked by `AMBER_KEY =`. prose: a sentence and a question. "
            "Default: code for 'demo' and 'demo-train', else prose."
        ),
    ] = None,
    needle: Annotated[
        str | None,
        Flag("--needle", metavar="TEMPLATE"),
        Doc("Your own needle, with {key}, and {name} if --keys is above 1."),
    ] = None,
    question: Annotated[
        str | None,
        Flag("--question", metavar="TEMPLATE"),
        Doc("For --needle: the last line, which the key completes, with {name}."),
    ] = None,
    keys: Annotated[
        int, Ge(1), Doc("Number of needles with different names. One is asked for, the others are spread evenly.")
    ] = 1,
    mode: options.Mode = "rank",
    candidates: options.Candidates = None,
    chat_template: options.ChatTemplate = "auto",
    seed: options.Seed = 0,
    method: options.InMemory = None,
    factor: options.Factor = None,
    settings: options.Settings = None,
    factors_file: options.FactorsFile = None,
    original_length: options.OriginalLength = None,
    text_column: options.TextColumn = "text",
    dataset_config: options.DatasetConfig = None,
    split: options.Split = None,
    chunk: options.Chunk = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
    max_memory: options.MaxMemory = None,
    load_in_8bit: options.LoadIn8bit = False,
    load_in_4bit: options.LoadIn4bit = False,
    attn: options.Attn = "auto",
    output: options.ReportFile = None,
    plot: options.PlotFile = None,
    revision: options.Revision = None,
) -> "RetrievalReport":
    """Measure whether a model finds a needle in a text of your choice, by length and depth.

    The key is a random number of five digits. A model that confuses several --keys scores 1 ÷ keys.

    Several processes, started by `accelerate launch -m ropecli needle ...`, share the prompts.
    """
    from ropecli.commands.subject import open_subject
    from ropecli.data.sources import read_texts
    from ropecli.evaluation.chat_frame import find_frame
    from ropecli.evaluation.retrieval.haystack import read_haystack
    from ropecli.evaluation.retrieval.prompts import RetrievalTask
    from ropecli.evaluation.retrieval.templates import choose_templates, default_style

    data = options.with_config(data, dataset_config)
    loading = options.loading_of(dtype, device, attn, device_map, max_memory, load_in_8bit, load_in_4bit)
    search = make_search(
        lengths,
        depths,
        mode=mode,
        chunk=chunk,
        candidates=candidates,
        trials=trials,
        seed=seed,
        output=output,
        plot=plot,
        keys=keys,
    )
    default = default_style(data)
    templates = choose_templates(style, needle, question, default)
    templates.check_keys(keys)
    subject = open_subject(checkpoint, revision, method, factor, settings, factors_file, original_length)
    search = search.at(subject)
    texts = read_texts(data, text_column=text_column, split=split)

    def make_task(pieces: "PieceTokenizer") -> "RetrievalTask":
        with progress_bar("reading documents", None) as step:
            haystack = read_haystack(texts, pieces, step)
        if len(haystack.ids) < search.lengths[-1]:
            warn(f"The text has {len(haystack.ids)} tokens. It is repeated to fill {search.lengths[-1]}.")
        return RetrievalTask(
            "needle",
            templates,
            haystack,
            pieces,
            keys=keys,
            candidates=search.candidates,
            seed=seed,
            frame=find_frame(pieces.tokenizer, chat_template),
        )

    own = {"style": (style or default) if needle is None else None, "text_column": text_column, "split": split}
    return search.run(subject, data, make_task, own, **loading)
