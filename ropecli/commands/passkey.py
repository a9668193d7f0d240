"""`ropecli passkey`: measures whether a model finds a number among repeated sentences."""

from typing import TYPE_CHECKING

from ropecli.commands import options
from ropecli.commands.key_search import DEPTHS, make_search

if TYPE_CHECKING:
    from ropecli.evaluation.eval_report import RetrievalReport
    from ropecli.evaluation.retrieval.haystack import PieceTokenizer
    from ropecli.evaluation.retrieval.prompts import RetrievalTask


def passkey(
    checkpoint: options.Checkpoint,
    *,
    lengths: options.PromptLengths = None,
    depths: options.Depths = DEPTHS,
    trials: options.Trials = 5,
    mode: options.Mode = "rank",
    candidates: options.Candidates = None,
    chat_template: options.ChatTemplate = "auto",
    seed: options.Seed = 0,
    method: options.InMemory = None,
    factor: options.Factor = None,
    settings: options.Settings = None,
    factors_file: options.FactorsFile = None,
    original_length: options.OriginalLength = None,
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
    """Measure whether a model finds a pass key in a long text, by length and depth.

    The task of Mohtashami and Jaggi (2023, arXiv:2305.16300): a key among repeated sentences.

    Several processes, started by `accelerate launch -m ropecli passkey ...`, share the prompts.
    """
    from ropecli.commands.subject import open_subject
    from ropecli.evaluation.chat_frame import find_frame
    from ropecli.evaluation.retrieval.haystack import repeat_sentences
    from ropecli.evaluation.retrieval.prompts import RetrievalTask
    from ropecli.evaluation.retrieval.templates import PASSKEY, PASSKEY_FILLER

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
    )
    subject = open_subject(checkpoint, revision, method, factor, settings, factors_file, original_length)
    search = search.at(subject)

    def make_task(pieces: "PieceTokenizer") -> "RetrievalTask":
        haystack = repeat_sentences(PASSKEY_FILLER, pieces, search.lengths[-1])
        frame = find_frame(pieces.tokenizer, chat_template)
        return RetrievalTask("passkey", PASSKEY, haystack, pieces, candidates=search.candidates, seed=seed, frame=frame)

    filler = {"filler": PASSKEY_FILLER}
    return search.run(subject, "repeated sentences", make_task, filler, **loading)
