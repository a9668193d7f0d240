"""Retrieval: whether a model finds a key hidden in a long text, by length and depth (`needle`).

The candidates of the mode rank are the true key and keys that appear nowhere in the prompt. They have as many tokens as
the true key, so that sums of log-probabilities are comparable. In the mode generate, the answer must start with the
key, ignoring white space. A digit after the key makes it a different number.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ropecli.data.sources import DEMO, DEMO_TRAIN
from ropecli.errors import DataError
from ropecli.evaluation.driver import SampleId
from ropecli.evaluation.lengths import Lengths
from ropecli.evaluation.needle_prompts import KEY_COUNT, PASSKEY_FILLER, STYLES, RetrievalPrompts
from ropecli.evaluation.prompt_pieces import PieceTokenizer, find_frame, read_haystack, repeat_sentences
from ropecli.evaluation.subject import Subject
from ropecli.evaluation.tasks.asking import Asking, Question
from ropecli.evaluation.texts import source_of
from ropecli.hashing import digest
from ropecli.messages import progress_bar, warn
from ropecli.options import NeedleOptions

_EXTRA_TOKENS = 4
"""Tokens generated beyond the key's own, for white space or another tokenization of the key. They exceed the length."""


class Retrieval(Asking):
    """prompts: makes the prompts. lengths: tokens of prompt and answer together, in both modes.

    depths: 0 puts the needle right after the introduction, 1 right before the question. samples: prompts for each
    length and depth. further: settings for the report. Raises DataError for a length that is too short.
    """

    name = "needle"
    guess = 1 / KEY_COUNT  # any key of five digits

    def __init__(
        self,
        prompts: RetrievalPrompts,
        lengths: Sequence[int],
        depths: Sequence[float],
        *,
        samples: int = 5,
        mode: str = "rank",
        source: str = "",
        **further: Any,
    ) -> None:
        self.prompts, self.mode, self.source, self.further = prompts, mode, source, further
        self.pieces, self.frame, self.seed, self.parts = prompts.pieces, prompts.frame, prompts.seed, [self.name]
        depths = sorted(set(map(float, depths)))
        self.lengths, self.depths, self.count = sorted(set(lengths)), depths, samples
        for length in self.lengths:
            if (least := prompts.most_tokens(length, depths, samples)) > length:
                raise DataError(
                    f"A prompt of {length} tokens is too short: introduction, needle, question and answer take "
                    f"{least}. Use longer --lengths."
                )

    def request(self) -> dict[str, Any]:
        text = digest(self.prompts.haystack.ids)
        return {"task": self.name, "lengths": self.lengths, "depths": self.depths, "text": text, **self.settings}

    def question(self, sample: SampleId) -> Question:
        prompt = self.prompts.prompt(*sample[1:])
        # if the tokenizer merges the end of the question with the key, the merged token belongs to the answer
        answer = self.prompts.pieces.text(prompt.answers[0]).strip()

        def grade(tokens: Sequence[int]) -> tuple[float, bool]:
            text = self.prompts.pieces.text(tokens).lstrip()
            if text.startswith(answer) and text != answer:
                return float(not text[len(answer)].isdigit()), True
            return float(text == answer), not answer.startswith(text.rstrip())

        identity = digest(np.array([*prompt.ids, *prompt.answers[0]]))
        limit = len(prompt.answers[0]) + _EXTRA_TOKENS
        return Question(prompt.ids, identity, lambda: prompt.answers, 1, limit, grade, prompt.lead)


def make_needle(options: NeedleOptions, tokenizer: Any, lengths: Lengths, subject: Subject) -> Retrieval:
    """The task, without default lengths that are too short."""
    depths, samples, mode = options["depths"], options["samples"], options["mode"]
    pieces, longest = PieceTokenizer(tokenizer), lengths.tokens[-1]
    if (style := options["style"]) == "passkey":
        haystack = repeat_sentences(PASSKEY_FILLER, pieces, longest)
        place: dict[str, Any] = {"source": "repeated sentences"}
    else:
        source = source_of(options)
        with progress_bar("reading documents", None) as step:
            haystack = read_haystack(source.limited().texts(), pieces, step)
        if len(haystack.ids) < longest:
            warn(f"The text has {len(haystack.ids)} tokens. It is repeated to fill {longest}.")
        style = style or ("code" if source.place in (DEMO, DEMO_TRAIN) else "prose")
        place = {"source": source.place, "text_column": source.column, "split": source.split}
    frame = find_frame(tokenizer, options["chat_template"], options["thinking"])
    prompts = RetrievalPrompts(STYLES[style], haystack, pieces, options["seed"], frame)
    chosen = lengths.that_fit(lambda length: prompts.most_tokens(length, depths, samples) <= length)
    further = {**place, "style": style, "thinking": options["thinking"]}
    return Retrieval(prompts, chosen, depths, samples=samples, mode=mode, **further)
