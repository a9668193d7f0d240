"""Retrieval: whether a model finds a key hidden in a long text, by length and depth (`passkey`, `needle`).

The candidates of the mode rank are the true key, the keys of the other needles in the prompt, and keys that appear
nowhere in it. They have as many tokens as the true key, so that sums of log-probabilities are comparable, unless the
tokenizer has too few such numbers. In the mode generate, the answer must start with the key, ignoring white space. A
digit after the key makes it a different number.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from ropecli.data.sources import Texts, read_texts
from ropecli.errors import MethodError
from ropecli.evaluation.chat_frame import find_frame
from ropecli.evaluation.measure import Key
from ropecli.evaluation.retrieval.haystack import PieceTokenizer, read_haystack, repeat_sentences
from ropecli.evaluation.retrieval.prompts import KEY_COUNT, RetrievalPrompts
from ropecli.evaluation.retrieval.templates import PASSKEY, PASSKEY_FILLER, STYLES, Templates, default_style
from ropecli.evaluation.subject import Subject, default_lengths
from ropecli.evaluation.tasks.asking import Asking, Question, check_mode
from ropecli.live.loading import load_tokenizer
from ropecli.messages import progress_bar, warn

_EXTRA_TOKENS = 4
"""Tokens generated beyond the key's own, for white space or another tokenization of the key. They exceed the length."""
_CANDIDATES = 10


class Retrieval(Asking):
    """prompts: makes the prompts. lengths: tokens of prompt and answer together, in both modes.

    depths: 0 puts the needle right after the introduction, 1 right before the question. samples: prompts for each
    length and depth. others: further settings for the report. Raises DataError for a length that is too short.
    """

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
        **others: Any,
    ) -> None:
        check_mode(mode)
        self.prompts, self.mode, self.source, self._others = prompts, mode, source, others
        self.name = prompts.name
        self.lengths, self.depths, self.count = sorted(set(lengths)), sorted(set(depths)), samples
        prompts.check_room(self.lengths, self.depths, samples)

    @property
    def settings(self) -> dict[str, Any]:
        prompts = self.prompts
        return {
            "mode": self.mode,
            "introduction": prompts.templates.introduction,
            "needle": prompts.templates.needle,
            "question": prompts.templates.question,
            "keys": prompts.keys,
            "candidates": prompts.candidates if self.mode == "rank" else None,
            "trials": self.count,
            "seed": prompts.seed,
            "chat_template": prompts.frame is not None,
            **self._others,
        }

    def request(self) -> dict[str, Any]:
        chosen = {"lengths": self.lengths, "depths": self.depths, "text": self.prompts.haystack.fingerprint()}
        return {"task": self.name, **chosen, **self.settings}

    def longest(self) -> tuple[np.ndarray, int, int]:
        return self.prompts.prompt(self.lengths[-1], self.depths[0], 0).ids, self.lengths[-1], 0

    def samples(self, *, one_pass: bool) -> list[Key]:
        return [(self.name, *sample) for sample in product(self.lengths, self.depths, range(self.count))]

    def question(self, key: Key) -> Question:
        prompt = self.prompts.prompt(*key[1:])
        # if the tokenizer merges the end of the question with the key, the merged token belongs to the answer
        answer = self.prompts.pieces.text(prompt.answers[0]).strip()

        def grade(tokens: Sequence[int]) -> tuple[float, bool]:
            text = self.prompts.pieces.text(tokens).lstrip()
            if text.startswith(answer) and text != answer:
                return float(not text[len(answer)].isdigit()), True
            return float(text == answer), not answer.startswith(text.rstrip())

        return Question(
            prompt.ids, prompt.digest(), lambda: prompt.answers, 1, len(prompt.answers[0]) + _EXTRA_TOKENS, grade
        )


@dataclass(frozen=True)
class RetrievalChoice:
    """The options of a search. lengths, candidates: None for the default.

    skip_short: skip lengths that are too short for a prompt, as without `lengths`.
    """

    lengths: Sequence[int] | None = None
    depths: Sequence[float] = (0, 0.25, 0.5, 0.75, 1)
    samples: int = 5
    mode: str = "rank"
    candidates: int | None = None
    chat_template: str = "auto"
    seed: int = 0
    skip_short: bool = False

    def checked(self, keys: int = 1) -> "RetrievalChoice":
        """With the number of candidates. keys: number of needles. Raises MethodError."""
        check_mode(self.mode)
        if self.mode == "generate" and self.candidates is not None:
            raise MethodError("--candidates has no effect with --mode generate. Remove it.")
        # for generate, the smallest number that the prompts accept
        candidates = keys + 1 if self.mode == "generate" else self.candidates or _CANDIDATES
        return replace(self, candidates=candidates, depths=[depth + 0.0 for depth in self.depths])


def make_passkey(subject: Subject, choice: RetrievalChoice) -> tuple[Retrieval, Any]:
    """The pass key of Mohtashami and Jaggi (2023, arXiv:2305.16300) among repeated sentences, and the tokenizer."""
    tokenizer, longest = load_tokenizer(subject.checkpoint), max(choice.lengths or default_lengths([subject]))
    pieces = PieceTokenizer(tokenizer)
    haystack = repeat_sentences(PASSKEY_FILLER, pieces, longest)
    prompts = RetrievalPrompts("passkey", PASSKEY, haystack, pieces, **_of_choice(tokenizer, choice))
    return _make(subject, prompts, choice, "repeated sentences", filler=PASSKEY_FILLER), tokenizer


def make_needle(
    subject: Subject,
    choice: RetrievalChoice,
    texts: Texts,
    templates: Templates,
    source: str,
    keys: int = 1,
    **others: Any,
) -> tuple[Retrieval, Any]:
    """A key in a text, and the tokenizer. keys: number of needles. others: settings for the report."""
    tokenizer, longest = load_tokenizer(subject.checkpoint), max(choice.lengths or default_lengths([subject]))
    pieces = PieceTokenizer(tokenizer)
    with progress_bar("reading documents", None) as step:
        haystack = read_haystack(texts, pieces, step)
    if len(haystack.ids) < longest:
        warn(f"The text has {len(haystack.ids)} tokens. It is repeated to fill {longest}.")
    prompts = RetrievalPrompts("needle", templates, haystack, pieces, keys=keys, **_of_choice(tokenizer, choice))
    return _make(subject, prompts, choice, source, **others), tokenizer


def needle_in(subject: Subject, choice: RetrievalChoice, source: str, **origin: Any) -> tuple[Retrieval, Any]:
    """A key in a source, with the default wording. origin: text column and split."""
    templates = STYLES[default_style(source)]
    return make_needle(subject, choice, read_texts(source, **origin), templates, source, **origin)


def _of_choice(tokenizer: Any, choice: RetrievalChoice) -> dict[str, Any]:
    frame = find_frame(tokenizer, choice.chat_template)
    return {"candidates": choice.candidates, "seed": choice.seed, "frame": frame}


def _make(
    subject: Subject, prompts: RetrievalPrompts, choice: RetrievalChoice, source: str, **others: Any
) -> Retrieval:
    """Without default lengths that are too short."""
    lengths = sorted(set(choice.lengths or default_lengths([subject])))
    if choice.lengths is None or choice.skip_short:
        fit = (length for length in lengths[:-1] if prompts.has_room(length, choice.depths, choice.samples))
        shortest = next(fit, lengths[-1])
        lengths = [length for length in lengths if length >= shortest]
    options: dict[str, Any] = {"samples": choice.samples, "mode": choice.mode, "source": source}
    return Retrieval(prompts, lengths, choice.depths, **options, **others)
