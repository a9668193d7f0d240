"""Prompts of RULER's tasks with exactly N tokens, counting the tokens that the model may generate.

Each piece of text is tokenized once, and a prompt is put together from token ids. So no search is needed, and the
length is exact: an essay and noise are cut to it; what remains of lists is filled with line breaks, after the
introduction.
The same seed, task, length and index give the same prompt for every model with the same tokenizer.
"""

import uuid
import zlib
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np

from ropecli.errors import DataError
from ropecli.evaluation.needle_prompts import PASSKEY_FILLER
from ropecli.evaluation.prompt_pieces import Frame, PieceTokenizer, TokenIds
from ropecli.evaluation.ruler_tasks import NEEDLE, Essay, Needles, RulerTask, Wording, word_list

CANDIDATES = 10
"""Candidates per true answer in the mode rank, so that guessing scores 1/10."""
_DEPTHS = np.round(np.linspace(0, 100, 40)).astype(int)
"""Depths of needles in an essay, percent."""
_VARIABLES, _EXAMPLE_LINES, _EXAMPLE_TOKENS = 5, 5, 500
"""Variables of a chain, lines of noise in the solved example at least, and its tokens at most."""
_COMMON, _FREQUENT, _LETTERS = 10, 3, 6
"""Common words, and frequent coded words, to find; letters of a coded word."""
_ZETA_2 = np.pi**2 / 6
_UPPER, _LOWER = np.array(list("ABCDEFGHIJKLMNOPQRSTUVWXYZ")), np.array(list("abcdefghijklmnopqrstuvwxyz"))
Generator = np.random.Generator


class _ListSize(NamedTuple):
    """in_list: how often a common and another word appear. example: words of the solved one. in_example: as in_list."""

    in_list: tuple[int, int]
    example: int
    in_example: tuple[int, int]


_SIZES = _ListSize((30, 3), 40, (10, 3)), _ListSize((6, 1), 20, (3, 1))
"""RULER's two; in prompts below 4,096 tokens, only the smaller."""


@dataclass(frozen=True)
class RulerPrompt:
    """ids: shape (tokens,), int64; with the tokens to generate, they have the asked length.

    references: the right answers. wrong: other candidates for the mode rank. lead: begins the answer after a thought.
    """

    ids: np.ndarray
    references: tuple[str, ...]
    wrong: tuple[str, ...]
    lead: str = ""


@dataclass(frozen=True)
class PromptMaker:
    """Makes prompts. frame: of the chat template. essay: for the tasks that need one."""

    tokenizer: PieceTokenizer
    frame: Frame | None = None
    essay: Essay | None = None
    seed: int = 0

    @cached_property
    def noise(self) -> Essay:
        """Lines of noise, each with the line break before it."""
        line = self.tokenizer.inside(f"\n{PASSKEY_FILLER}")
        return Essay([line], line)

    def make(self, task: RulerTask, length: int, index: int) -> RulerPrompt:
        """Raises DataError for a length that is too short for the task."""
        rng = np.random.default_rng((self.seed, zlib.crc32(task.name.encode()), length, index))
        draft = _RulerDraft(self, task, length, rng)
        if isinstance(task, Needles):
            return _needles(draft, task)
        return {"vt": _variables, "cwe": _common_words, "fwe": _frequent_words}[task.name](draft)


class _RulerDraft:
    """A prompt under construction: everything but its context."""

    def __init__(self, maker: PromptMaker, task: RulerTask, length: int, rng: Generator) -> None:
        self.maker, self.task, self.length, self.rng = maker, task, length, rng
        self.tokenizer = maker.tokenizer

    def wording(self, **values: object) -> Wording:
        wording = self.task.wording
        return Wording(*(text.format(**values) for text in (wording.head, wording.tail, wording.answer)))

    def frame(self, wording: Wording, *, lines: bool = False) -> int:
        """Set the text around the context. Returns the tokens that are left for it.

        lines: whether each piece of the context begins with a line break, the first one with the introduction's last.
        """
        frame, tokenizer = self.maker.frame, self.tokenizer
        self.head = tokenizer.head(wording.head.removesuffix("\n") if lines else wording.head, frame)
        after, answer = (frame.after, wording.answer.lstrip()) if frame else ("", wording.answer)
        self.lead = answer if frame and frame.thought else ""
        self.tail = tokenizer.inside(wording.tail + after + answer * (not self.lead))
        answered = self.task.generated + len(tokenizer.inside(self.lead))
        self.room = self.length - answered - len(self.head) - len(self.tail)
        return self.room

    def finish(self, context: Sequence[TokenIds], references: Sequence[str], wrong: Sequence[str] = ()) -> RulerPrompt:
        """Fill what the context leaves with line breaks, before it."""
        body, tokenizer = list(chain(*context)), self.tokenizer
        free = self.room - len(body)
        if free < 0:
            raise self.too_short()
        line_break = (tokenizer.inside("\n") or tokenizer.opening(" .") or tokenizer.opening("0"))[-1]
        ids = [*self.head, *[line_break] * free, *body, *self.tail]
        return RulerPrompt(np.array(ids, dtype=np.int64), tuple(references), tuple(wrong), self.lead)

    def too_short(self) -> DataError:
        return DataError(
            f"A prompt of {self.length} tokens is too short for {self.task.name}. Set --lengths to more, or leave the "
            "task out of --tasks."
        )

    def fresh(self, make: Callable[[], str], count: int, taken: Container[str]) -> list[str]:
        """`count` different texts that are not taken."""
        texts: dict[str, None] = {}
        while len(texts) < count:
            text = make()
            if text not in taken:
                texts[text] = None
        return list(texts)

    def sample(self, population: int, count: int) -> np.ndarray:
        """Sorted sample of range(population) without replacement."""
        if count > population:
            raise self.too_short()
        return np.sort(self.rng.choice(population, count, replace=False))


def _needles(draft: _RulerDraft, task: Needles) -> RulerPrompt:
    rng = draft.rng
    keys = draft.fresh(lambda: _text_of(task.key, rng), task.num_keys, ())
    values = [draft.fresh(lambda: _text_of(task.value, rng), task.num_values, ()) for _ in keys]
    needles = [(key, value) for key, its_values in zip(keys, values, strict=True) for value in its_values]
    needles = [needles[index] for index in rng.permutation(len(needles))]
    queried = rng.permutation(task.num_keys)[: task.num_queries]
    names = [keys[index] for index in queried]
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])}, and {names[-1]}"
    form = task.value[:-1] if task.num_queries * task.num_values == 1 else task.value
    essay = draft.maker.essay if task.haystack == "essay" else None
    lines = draft.tokenizer.each_inside([_needle(task, " " if essay else "\n", *pair) for pair in needles])
    room = draft.frame(draft.wording(values=form, asked=listed), lines=not essay) - sum(map(len, lines))
    hidden: list[str] = []
    if essay:
        context = essay.read(room)
        places = np.sort(len(context) * rng.choice(_DEPTHS, len(lines), replace=False) // 100)
        if places[0] == 0:  # the needle opens the text, without a space
            room += len(lines[0])
            lines[0] = draft.tokenizer.inside(_needle(task, "", *needles[0]))
            context = essay.read(room - len(lines[0]), after_needle=True)
    elif task.haystack == "noise":
        context = draft.maker.noise.read(room)
        places = draft.sample(len(context), len(lines))
    else:
        context, hidden = _other_needles(draft, task, room)
        places = draft.sample(len(context), len(lines))
    _insert(context, places, lines)
    references = [value for index in queried for value in values[index]]
    wrong = [value for its_values in values for value in its_values if value not in references]
    rng.shuffle(hidden)
    wrong = list(dict.fromkeys([*wrong, *hidden]))[: (CANDIDATES - 1) * len(references)]
    more = (CANDIDATES - 1) * len(references) - len(wrong)
    wrong += draft.fresh(lambda: _text_of(task.value, rng), more, [*references, *wrong])
    return draft.finish(context, references, wrong)


def _needle(task: Needles, before: str, key: str, value: str) -> str:
    return before + NEEDLE.format(values=task.value, key=key, value=value)


def _other_needles(draft: _RulerDraft, task: Needles, room: int) -> tuple[list[TokenIds], list[str]]:
    """Lines with other needles that fill `room` tokens, and their values."""
    lines: list[TokenIds] = []
    values: list[str] = []
    free = room
    while True:
        count = max(8, free // 20)
        pairs = [(_text_of(task.key, draft.rng), _text_of(task.value, draft.rng)) for _ in range(count)]
        texts = [_needle(task, "\n", *pair) for pair in pairs]
        for line, pair in zip(draft.tokenizer.each_inside(texts), pairs, strict=True):
            if len(line) > free:
                return lines, values
            lines.append(line)
            values.append(pair[1])
            free -= len(line)


def _text_of(kind: str, rng: Generator) -> str:
    """A key or value: a number of seven digits, an adjective and a noun, or a UUID."""
    if kind == "numbers":
        return str(rng.integers(10**6, 10**7))
    if kind == "uuids":
        return str(uuid.UUID(bytes=rng.bytes(16), version=4))
    adjectives, nouns = word_list("adjectives"), word_list("nouns")
    return f"{adjectives[rng.integers(len(adjectives))]}-{nouns[rng.integers(len(nouns))]}"


def _insert(context: list[Any], places: np.ndarray, pieces: Sequence[Any]) -> None:
    for place, piece in reversed(list(zip(places, pieces, strict=True))):
        context.insert(place, piece)


def _variables(draft: _RulerDraft) -> RulerPrompt:
    """A chain of variable assignments in noise.

    Begins with a solved example: variables of three letters in five lines of noise, or up to 500 tokens in RULER.
    """
    rng, count = draft.rng, _VARIABLES

    def assignments(letters: int) -> tuple[list[str], list[str], Wording]:
        """The variables, their lines, and the text around these."""
        names = draft.fresh(lambda: "".join(rng.choice(_UPPER, letters)), count, ())
        value = str(rng.integers(10_000, 99_999))
        later = [f"\nVAR {name} = VAR {before} " for before, name in pairwise(names)]
        wording = draft.wording(value=value, count=count)
        return names, [f"\nVAR {names[0]} = {value}", *later], wording

    names, lines, wording = assignments(5)
    solved, solved_lines, solved_wording = assignments(3)
    fixed = "".join((solved_wording.head, solved_wording.tail, solved_wording.answer, *solved_lines))
    most = min(_EXAMPLE_TOKENS, draft.length // 8) - len(draft.tokenizer.inside(fixed))
    example = [PASSKEY_FILLER] * max(_EXAMPLE_LINES, most // len(draft.maker.noise.opening))
    _insert(example, draft.sample(len(example), count), [line.removeprefix("\n") for line in solved_lines])
    answer = f"{solved_wording.tail}{solved_wording.answer} {' '.join(solved)}\n\n"
    head = solved_wording.head + "\n".join(example) + answer + wording.head
    room = draft.frame(Wording(head, wording.tail, wording.answer), lines=True)
    chain_of_lines = draft.tokenizer.each_inside(lines)
    context = draft.maker.noise.read(room - sum(map(len, chain_of_lines)))
    _insert(context, draft.sample(len(context), count), chain_of_lines)
    wrong = draft.fresh(lambda: "".join(rng.choice(_UPPER, 5)), (CANDIDATES - 1) * count, names)
    return draft.finish(context, names, wrong)


def _common_words(draft: _RulerDraft) -> RulerPrompt:
    """A numbered list in which some words are more frequent than others. Begins with a solved example.

    Of the larger of RULER's two sizes that fits. Once all words are in the list, pairs like RULER's keys follow.
    """
    for size in _SIZES if draft.length >= 4096 else _SIZES[1:]:
        if prompt := _words_of_size(draft, size):
            return prompt
    raise draft.too_short()


def _words_of_size(draft: _RulerDraft, size: _ListSize) -> RulerPrompt | None:
    rng, tokenizer, wording = draft.rng, draft.tokenizer, draft.task.wording
    known = sorted({word for kind in ("nouns", "adjectives", "verbs") for word in word_list(kind)})
    words = [known[index] for index in rng.permutation(len(known))]
    listed, common = _list_of_words(rng, words[: size.example], *size.in_example)
    example, answer = (
        " ".join(f"{number}. {word}" for number, word in enumerate(group, 1)) for group in (listed, common)
    )
    solved = f"{wording.head}{example}{wording.tail}{wording.answer} {answer}\n"
    room = draft.frame(Wording(solved + wording.head, wording.tail, wording.answer))
    words = words[size.example :]
    ids = dict(zip(words, tokenizer.each_inside([f" {word}" for word in words]), strict=True))
    while (count := _most_words(draft, [*map(len, ids.values())], size, room)) == len(ids):
        pairs = draft.fresh(lambda: _text_of("words", rng), len(ids), ids)
        # an answer with such a pair would seem to have the common word
        pairs = [pair for pair in pairs if not any(word.lower() in pair.lower() for word in words[:_COMMON])]
        ids.update(zip(pairs, tokenizer.each_inside([f" {pair}" for pair in pairs]), strict=True))
    if count < 2 * _COMMON:
        return None
    used = list(ids)[:count]
    listed, common = _list_of_words(rng, used, *size.in_list)
    numbers = _entry_numbers(draft, len(listed))
    context = [piece for number, word in zip(numbers, listed, strict=True) for piece in (number, ids[word])]
    return draft.finish(context, common, used[_COMMON:][: (CANDIDATES - 1) * _COMMON])


def _most_words(draft: _RulerDraft, tokens: Sequence[int], size: _ListSize, room: int) -> int:
    """Return the number of words, from the first on, whose list fits. tokens: of each word."""
    often, seldom = size.in_list
    repeats = np.array([often] * _COMMON + [seldom] * (len(tokens) - _COMMON))
    word_tokens = (repeats * tokens).cumsum()
    entries = repeats.cumsum()
    entries = entries[entries <= max(0, room)]  # an entry has at least one token
    numbers = _entry_numbers(draft, int(entries.max(initial=0)))
    number_tokens = np.array([len(ids) for ids in numbers]).cumsum()
    return int((word_tokens[: len(entries)] + number_tokens[entries - 1] <= room).sum()) if len(entries) else 0


def _entry_numbers(draft: _RulerDraft, count: int) -> list[TokenIds]:
    """The numbers of a list, with the space before each but the first."""
    return draft.tokenizer.each_inside([f" {number}."[number == 1 :] for number in range(1, count + 1)])


def _list_of_words(rng: Generator, words: list[str], often: int, seldom: int) -> tuple[list[str], list[str]]:
    """The words in random order, the common ones more often. Returns the list and the common words."""
    repeated = words[:_COMMON] * often + words[_COMMON:] * seldom
    return [repeated[index] for index in rng.permutation(len(repeated))], words[:_COMMON]


def _frequent_words(draft: _RulerDraft) -> RulerPrompt:
    """Coded words whose frequencies follow a zeta distribution with an exponent of 2."""
    rng, task = draft.rng, draft.task
    size = max(10, (draft.length - task.generated) // 50)
    coded = draft.fresh(lambda: "".join(rng.choice(_LOWER, _LETTERS)), size - 1, ())
    words = ["...", *coded]  # the most frequent is noise
    room = draft.frame(task.wording)
    ids = draft.tokenizer.each_inside([f" {word}" for word in words])
    tokens = np.array([len(piece) for piece in ids])
    shares = np.arange(1, size + 1) ** -2.0 / _ZETA_2
    low, high = 0, 2 * room
    while low < high:  # the most words that fit
        middle = (low + high + 1) // 2
        fits = ((middle * shares).astype(int) * tokens).sum() <= room
        low, high = (middle, high) if fits else (low, middle - 1)
    counts = (low * shares).astype(int)
    if counts[_FREQUENT] <= counts[_FREQUENT + 1]:
        raise draft.too_short()
    which = rng.permutation(np.repeat(np.arange(size), counts))
    context = [ids[index] for index in which]
    noise = (room - sum(map(len, context))) // len(ids[0])
    return draft.finish(
        [*context, *[ids[0]] * noise],
        words[1 : 1 + _FREQUENT],
        words[1 + _FREQUENT :][: (CANDIDATES - 1) * _FREQUENT],
    )
