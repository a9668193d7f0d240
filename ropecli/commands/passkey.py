"""`ropecli passkey`: measures whether a model finds a number among repeated sentences."""

from typing import TYPE_CHECKING

from typing_extensions import Unpack

from ropecli.commands import options
from ropecli.commands.key_search import make_search
from ropecli.commands.signature import command

if TYPE_CHECKING:
    from ropecli.evaluation.eval_report import RetrievalReport
    from ropecli.evaluation.retrieval.haystack import PieceTokenizer
    from ropecli.evaluation.retrieval.prompts import RetrievalTask


@command
def passkey(
    checkpoint: options.Checkpoint,
    **shared: Unpack[options.SearchOptions],
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

    loading = options.loading_of(shared)
    search = make_search(shared)
    subject = open_subject(checkpoint, shared)
    search = search.at(subject)

    def make_task(pieces: "PieceTokenizer") -> "RetrievalTask":
        haystack = repeat_sentences(PASSKEY_FILLER, pieces, search.lengths[-1])
        frame = find_frame(pieces.tokenizer, shared["chat_template"])
        picked = {"candidates": search.candidates, "seed": search.seed}
        return RetrievalTask("passkey", PASSKEY, haystack, pieces, frame=frame, **picked)

    filler = {"filler": PASSKEY_FILLER}
    return search.run(subject, "repeated sentences", make_task, filler, **loading)
